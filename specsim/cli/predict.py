"""specsim predict: predict accept lengths of many settings from one recording, and measure them."""

from typing import Annotated

from specsim.cli import options
from specsim.cli.options import option
from specsim.core.config import SamplingParams
from specsim.core.errors import InputError


def predict(
    prompts: Annotated[int, option("Requests", "Number of shipped prompts. [at least 1]")] = 12,
    max_new_tokens: Annotated[int, option("Requests", "Largest number of new tokens per prompt. [at least 1]")] = 64,
    drafter: Annotated[str, option("Model", "Drafter architecture.", metavar="eagle|eagle3")] = "eagle3",
    json_file: options.JsonFile = None,
) -> None:
    """Predict accept lengths of 30 settings, then measure them.

    All predictions come from one recorded run of the shipped pair; the command takes a few minutes.

    Exit status: 0 if the mean error is at most 3 %, 1 if it is above, 2 for bad input.

    Example:
      specsim predict --prompts 6 --json shares.json
    """
    from specsim.acceptance.prediction import TARGET_ERROR, show
    from specsim.acceptance.prediction import predict as run
    from specsim.core.files import check_writable
    from specsim.models.load import load

    SamplingParams(max_new_tokens=max_new_tokens)
    check_writable(json_file)
    texts = options.shipped_texts(prompts)
    if drafter not in ("eagle", "eagle3"):
        raise InputError("drafter", drafter, "eagle or eagle3")
    predictions = run(load(drafter=drafter), texts, max_new_tokens, progress=True)
    is_ok = predictions.mean_error <= TARGET_ERROR
    options.report("predict", lambda console: show(predictions, console), predictions.to_json(), json_file, is_ok)
