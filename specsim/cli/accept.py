"""specsim accept: measure the acceptance of any pair, or of the shipped drafters."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli import options
from specsim.cli.file_options import check_png, png, reads, writes
from specsim.cli.option_groups import EngineGroup, flat, with_groups
from specsim.cli.options import option
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError, require, require_int
from specsim.core.files import write_whole
from specsim.core.kinds import DEFAULT, KINDS

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.acceptance_record import AcceptanceRecord


STEPS = 3  # of a chain, unless given
_PAIR_ONLY = {
    "draft": None,
    "topk": 1,
    "num_steps": STEPS,
    "num_draft_tokens": None,
    "temperature": 0.0,
    "seed": 0,
    "batch": None,
    "baseline": None,
    "tolerance": None,
    "plot": None,
    "impl": "reference",
    "dtype": "float32",
    "device": None,
    "graph": None,
    "bucket": None,
    "batch_invariant": False,
    "kv_dtype": "model",
    "draft_kv_dtype": "model",
    "forward": "auto",
}


@with_groups
def accept(
    *,
    target: Annotated[
        str | None,
        option(
            "Model",
            "Target model: a folder, a hub id, or tiny, the shipped one. Measures one setting of this pair.",
            show_default="study of the shipped drafters",
            callback=reads,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        option("Model", "Drafter's weights: a folder or a hub id.", show_default="of --drafter", callback=reads),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        option(
            "Model",
            f"Drafter: {', '.join(sorted(KINDS, key=lambda name: name != DEFAULT))}, or MODULE:NAME of your own; may "
            "be repeated. With --target also a folder or hub id of weights.",
            metavar="NAME",
            show_default="all shipped ones",
            callback=reads,
        ),
    ] = None,
    topk: options.Topk = 1,
    num_steps: options.NumSteps = STEPS,
    num_draft_tokens: options.NumDraftTokens = None,
    prompts: Annotated[
        str | None,
        option(
            "Requests",
            "File of prompts, a text per line or JSON Lines; or a number of shipped prompts, and of edits. [at least "
            "1]",
            metavar="FILE|N",
            show_default="all shipped ones",
            callback=reads,
        ),
    ] = None,
    max_new_tokens: Annotated[int, option("Requests", "Largest number of new tokens per prompt. [at least 1]")] = 64,
    temperature: Annotated[float, option("Sampling", "Sampling temperature; 0 is greedy. [at least 0]")] = 0.0,
    seed: Annotated[int, option("Sampling", "Random seed. [0 to 2^64 - 1]")] = 0,
    batch: Annotated[
        int | None, option("Execution", "Requests that run at once. [at least 1]", show_default="16")
    ] = None,
    engine: EngineGroup,
    jobs: Annotated[int, option("Execution", "Processes that share the study's runs. [at least 1]")] = 1,
    baseline: Annotated[
        str | None,
        option(
            "Answers",
            "Earlier record, or metrics of an engine, that the accept length is compared with.",
            metavar="FILE",
            show_default=False,
            callback=reads,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        option("Answers", "Relative loss that is no regression. [0 to 1]", show_default="0.02"),
    ] = None,
    json_file: options.JsonFile = None,
    plot: Annotated[
        Path | None,
        option("Output", "Draw acceptance by position to this PNG file.", metavar="FILE", callback=writes),
    ] = None,
) -> None:
    """Measure the accept length of a pair, or of all shipped ones.

    With --target it measures one setting on your prompts, and --json writes an acceptance record, which plan,
    simulate, predict and lint-report take. The interval is a bootstrap over requests.

    Without --target it studies the shipped drafters: a chain of 3 and a tree, at temperature 0 and 1, on the held-out
    prompts. Those without weights also run on edits, prompts that end within a copy of an excerpt. All drafters on all
    prompts take some 30 minutes of CPU time.

    Exit status: 0 when done, 1 if the accept length fell by more than the tolerance with 95 % confidence, or if an
    output of the study at temperature 0 differs from plain decoding's, 2 for bad input.

    Examples:
      specsim accept --target tiny --drafter eagle3 --json record.json
      specsim accept --target tiny --drafter eagle3 --baseline record.json
      specsim accept --drafter ngram --drafter my_drafter.py:SameAgain --prompts 5
    """
    arguments = flat(locals())
    SamplingParams(max_new_tokens=max_new_tokens)
    require_int("jobs", jobs)
    if target is not None:
        require(jobs == 1, "jobs", jobs, "1 with --target, whose requests run in one batch")
        accept_pair(
            arguments, engine, options.command(accept, arguments, ("json_file", "plot", "baseline", "tolerance"))
        )
        return
    for name, default in _PAIR_ONLY.items():
        require(
            arguments[name] == default, name, str(arguments[name]), f"only {default}, the default, without --target"
        )
    _study(arguments)


def _study(arguments: dict[str, Any]) -> None:
    """Study shipped drafters."""
    from specsim.acceptance.settings import DRAFTERS, settings_of
    from specsim.acceptance.study import measure, show
    from specsim.models.load import load_shipped

    count = _count(arguments["prompts"])
    drafters = list(dict.fromkeys(arguments["drafter"] or DRAFTERS))
    settings = [setting for name in drafters for setting in settings_of(name)]
    for name in drafters:
        load_shipped(name)  # bad input, if any, is refused before the first run
    texts = {"prompts": options.shipped_texts(count), "edits": options.shipped_texts(None, "edits")[:count]}
    study = measure(load_shipped, texts, arguments["max_new_tokens"], settings, arguments["jobs"], progress=True)
    options.report(
        "accept", lambda console: show(study, console), study.to_json(), arguments["json_file"], study.is_lossless
    )


def _count(prompts: str | None) -> int | None:
    """Read a number of shipped prompts."""
    if prompts is None:
        return None
    try:
        return int(prompts)
    except ValueError:
        raise InputError("prompts", prompts, "a number of shipped prompts; a file goes with --target") from None


def accept_pair(arguments: dict[str, Any], engine: EngineGroup, source: str) -> None:
    """Measure a pair, report the record, and compare it with a baseline; source: the command line."""
    from specsim.acceptance.baseline import TOLERANCE, compare
    from specsim.acceptance.files import read_record
    from specsim.acceptance.measured_pair import BATCH, measure_pair, read_prompts
    from specsim.acceptance.record_prediction import show_record
    from specsim.models.load import is_token_drafter, load, load_config

    config = options.pick(SpecConfig, arguments)
    require(not config.is_plain, "num_steps", config.num_steps, "at least 1: plain decoding has no drafts")
    sampling = options.pick(SamplingParams, arguments)
    tolerance = arguments["tolerance"]
    earlier = None if arguments["baseline"] is None else read_record(arguments["baseline"], "baseline")
    require(tolerance is None or earlier, "tolerance", tolerance, "nothing without --baseline")
    require(tolerance is None or 0 <= tolerance < 1, "tolerance", tolerance, "a relative loss from 0 up to 1")
    check_png(arguments["plot"])
    file = _prompt_file(arguments["prompts"])
    prompts = read_prompts(file) if file is not None else list(options.shipped_texts(_count(arguments["prompts"])))
    kind, draft = _drafter(arguments)
    places = (arguments["target"], draft, kind)
    engine_options = engine.options(config, drafts_on_host=is_token_drafter(kind))
    config.within(load_config(*places).max_position_embeddings)
    pair = load(*places)
    batch = BATCH if arguments["batch"] is None else arguments["batch"]
    record = measure_pair(pair, prompts, config, sampling, engine_options, batch, progress=True)
    record = replace(record, source=source)
    compared = None if earlier is None else compare(record, earlier, TOLERANCE if tolerance is None else tolerance)

    def print_all(console: "Console") -> None:
        show_record(record, console)
        if compared is not None:
            from specsim.core.display import paragraph

            console.print()
            paragraph(console, str(compared))

    try:
        options.report("acceptance", print_all, record.to_json(), arguments["json_file"])
    finally:
        if arguments["plot"] is not None:
            write_whole(arguments["plot"], _picture(record), "plot")
    if compared is not None and compared.is_regression:
        raise typer.Exit(1)


def _picture(record: "AcceptanceRecord") -> bytes:
    return png("acceptance_rates", {record.pair: record})


def _drafter(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    """Give the kind of the drafter and its weights; a name that is no kind is that of weights."""
    names = arguments["drafter"] or []
    require(len(names) <= 1, "drafter", ", ".join(names), "one drafter with --target")
    name = names[0] if names else None
    is_kind = name is None or name in (*KINDS, "none") or ":" in name
    require(name != "none", "drafter", name, "a drafter: plain decoding has no drafts")
    if is_kind:
        return name, arguments["draft"]
    if arguments["draft"] is not None:
        raise InputError("drafter", name, "a kind of drafter with --draft, which names the weights")
    return None, name


def _prompt_file(prompts: str | None) -> Path | None:
    """Give the file of prompts; None for shipped ones."""
    return None if prompts is None or prompts.isdecimal() else Path(prompts)
