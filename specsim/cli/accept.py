"""specsim accept: measure the acceptance of the shipped drafters."""

from typing import Annotated

import typer

from specsim.cli import options
from specsim.core.config import SamplingParams


def accept(
    prompts: Annotated[int | None, typer.Option(help="Number of shipped prompts.", show_default="all")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 64,
    json_file: options.JsonFile = None,
) -> None:
    """Measure acceptance of the shipped drafters (some minutes)."""
    from specsim.acceptance.study import measure, show
    from specsim.core.files import check_writable
    from specsim.models.load import load

    SamplingParams(max_new_tokens=max_new_tokens)
    check_writable(json_file)
    texts = options.shipped_texts(prompts)
    pairs = {drafter: load(drafter=drafter) for drafter in ("eagle3", "eagle")}
    study = measure(pairs, texts, max_new_tokens, progress=True)
    options.report(lambda console: show(study, console), study.to_json(), json_file, study.is_lossless)
