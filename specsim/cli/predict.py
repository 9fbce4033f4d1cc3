"""specsim predict: predict accept lengths of many settings from one recording, and measure them."""

from typing import Annotated

import typer

from specsim.cli import options
from specsim.core.config import SamplingParams
from specsim.core.errors import InputError


def predict(
    prompts: Annotated[int, typer.Option(help="Number of shipped prompts.")] = 12,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 64,
    drafter: Annotated[str, typer.Option(help="Drafter architecture.", metavar="eagle|eagle3")] = "eagle3",
    json_file: options.JsonFile = None,
) -> None:
    """Predict accept lengths of 30 settings, then measure them.

    A few minutes; exit status 1 where the mean error is above 3 %.
    """
    from specsim.acceptance.prediction import ASKED, show
    from specsim.acceptance.prediction import predict as run
    from specsim.core.files import check_writable
    from specsim.models.load import load

    SamplingParams(max_new_tokens=max_new_tokens)
    check_writable(json_file)
    texts = options.shipped_texts(prompts)
    if drafter not in ("eagle", "eagle3"):
        raise InputError("drafter", drafter, "eagle or eagle3")
    predictions = run(load(drafter=drafter), texts, max_new_tokens, progress=True)
    is_ok = predictions.mean_error <= ASKED
    options.report(lambda console: show(predictions, console), predictions.to_json(), json_file, is_ok)
