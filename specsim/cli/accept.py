"""specsim accept: measure the acceptance of the shipped drafters, or of your own."""

from typing import Annotated

from specsim.cli import options
from specsim.cli.options import option
from specsim.core.config import SamplingParams
from specsim.core.errors import require_int


def accept(
    drafter: Annotated[
        list[str] | None,
        option(
            "Model",
            "Drafter: eagle3, eagle, mtp, frozen-kv, standalone, ngram, suffix, or MODULE:NAME of your own; may be "
            "repeated.",
            metavar="NAME",
            show_default="all shipped ones",
        ),
    ] = None,
    prompts: Annotated[
        int | None, option("Requests", "Number of shipped prompts, and of edits. [at least 1]", show_default="all")
    ] = None,
    max_new_tokens: Annotated[int, option("Requests", "Largest number of new tokens per prompt. [at least 1]")] = 64,
    jobs: Annotated[int, option("Execution", "Processes that share the runs. [at least 1]")] = 1,
    json_file: options.JsonFile = None,
) -> None:
    """Measure accept lengths of the shipped drafters.

    Each drafts a chain of 3 and a tree, at temperature 0 and 1, on the held-out prompts. Those without weights also run
    on edits, prompts that end within a copy of an excerpt. All drafters on all prompts take some 20 minutes of CPU
    time.

    Exit status: 0 if every output at temperature 0 equals that of plain decoding, 1 if one does not, 2 for bad input.

    Examples:
      specsim accept --jobs 4 --json accept.json
      specsim accept --drafter ngram --drafter my_drafter.py:SameAgain --prompts 5
    """
    from specsim.acceptance.settings import NAMES, settings_of
    from specsim.acceptance.study import measure, show
    from specsim.core.files import check_writable
    from specsim.models.load import load_shipped

    SamplingParams(max_new_tokens=max_new_tokens)
    require_int("jobs", jobs)
    check_writable(json_file)
    drafters = list(dict.fromkeys(drafter or NAMES))
    settings = [setting for name in drafters for setting in settings_of(name)]
    for name in drafters:
        load_shipped(name)  # bad input, if any, is refused before the first run
    texts = {"prompts": options.shipped_texts(prompts), "edits": options.shipped_texts(None, "edits")[:prompts]}
    study = measure(load_shipped, texts, max_new_tokens, settings, jobs, progress=True)
    options.report("accept", lambda console: show(study, console), study.to_json(), json_file, study.is_lossless)
