"""Acceptance of one pair under one setting: the part of specsim accept that --target names."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specsim.cli import options
from specsim.cli.option_groups import EngineGroup
from specsim.cli.picture import check_png, png
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.files import write_whole
from specsim.core.kinds import KINDS

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.acceptance_record import AcceptanceRecord


def accept_pair(given: dict[str, Any], engine: EngineGroup, source: str) -> None:
    """Measure a pair, report the record, and compare it with a baseline; source: the command line."""
    from specsim.acceptance.baseline import TOLERANCE, compare
    from specsim.acceptance.files import read_record
    from specsim.acceptance.measured_pair import BATCH, measure_pair, read_prompts
    from specsim.acceptance.record_prediction import show_record
    from specsim.models.load import is_token_drafter, load, load_config

    config = options.pick(SpecConfig, given)
    require(not config.is_plain, "num_steps", config.num_steps, "at least 1: plain decoding has no drafts")
    sampling = options.pick(SamplingParams, given)
    tolerance = given["tolerance"]
    earlier = None if given["baseline"] is None else read_record(given["baseline"], "baseline")
    require(tolerance is None or earlier, "tolerance", tolerance, "nothing without --baseline")
    require(tolerance is None or 0 <= tolerance < 1, "tolerance", tolerance, "a relative loss from 0 up to 1")
    check_png(given["plot"])
    file = _prompt_file(given["prompts"])
    prompts = read_prompts(file) if file is not None else list(options.shipped_texts(_count(given["prompts"])))
    kind, draft = _drafter(given)
    places = (given["target"], draft, kind)
    engine_options = engine.options(config, drafts_on_host=is_token_drafter(kind))
    config.within(load_config(*places).max_position_embeddings)
    pair = load(*places)
    batch = BATCH if given["batch"] is None else given["batch"]
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
        options.report("acceptance", print_all, record.to_json(), given["json_file"])
    finally:
        if given["plot"] is not None:
            write_whole(given["plot"], _picture(record), "plot")
    if compared is not None and compared.is_regression:
        raise typer.Exit(1)


def _picture(record: "AcceptanceRecord") -> bytes:
    return png("acceptance_rates", {record.pair: record})


def _drafter(given: dict[str, Any]) -> tuple[str | None, str | None]:
    """Give the kind of the drafter and its weights; a name that is no kind is that of weights."""
    names = given["drafter"] or []
    require(len(names) <= 1, "drafter", ", ".join(names), "one drafter with --target")
    name = names[0] if names else None
    is_kind = name is None or name in (*KINDS, "none") or ":" in name
    require(name != "none", "drafter", name, "a drafter: plain decoding has no drafts")
    if is_kind:
        return name, given["draft"]
    if given["draft"] is not None:
        raise InputError("drafter", name, "a kind of drafter with --draft, which names the weights")
    return None, name


def _prompt_file(prompts: str | None) -> Path | None:
    """Give the file of prompts; None for shipped ones."""
    return None if prompts is None or prompts.isdecimal() else Path(prompts)


def _count(prompts: str | None) -> int | None:
    return None if prompts is None else int(prompts)
