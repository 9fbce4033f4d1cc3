"""specsim accept: measure the acceptance of the shipped drafters."""

from typing import Annotated

from specsim.cli import options
from specsim.cli.options import option
from specsim.core.config import SamplingParams


def accept(
    prompts: Annotated[
        int | None, option("Requests", "Number of shipped prompts. [at least 1]", show_default="all")
    ] = None,
    max_new_tokens: Annotated[int, option("Requests", "Largest number of new tokens per prompt. [at least 1]")] = 64,
    json_file: options.JsonFile = None,
) -> None:
    """Measure accept lengths of the shipped drafters.

    Eleven settings of both drafters, at temperature 0 and 1; all prompts take some minutes.

    Exit status: 0 if every output at temperature 0 equals that of plain decoding, 1 if one does not, 2 for bad input.

    Example:
      specsim accept --prompts 5 --json accept.json
    """
    from specsim.acceptance.study import measure, show
    from specsim.core.files import check_writable
    from specsim.models.load import load

    SamplingParams(max_new_tokens=max_new_tokens)
    check_writable(json_file)
    texts = options.shipped_texts(prompts)
    pairs = {drafter: load(drafter=drafter) for drafter in ("eagle3", "eagle")}
    study = measure(pairs, texts, max_new_tokens, progress=True)
    options.report("accept", lambda console: show(study, console), study.to_json(), json_file, study.is_lossless)
