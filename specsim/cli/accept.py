"""specsim accept: measure the acceptance of any pair, or of the shipped drafters."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from specsim.cli.file_options import check_png, png
from specsim.cli.option_fields import command_line, common, option, refuse_others
from specsim.cli.options import (
    DraftLimitOptions,
    DraftTreeOptions,
    ImplementationOptions,
    JsonOptions,
    pick,
    report,
    shipped_texts,
)
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.files import write_whole
from specsim.core.kinds import DEFAULT, KINDS
from specsim.core.limits import BatchSize, JobCount, NonNegativeNumber, Seed

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.acceptance.measured_pair import Prompt


@dataclass(frozen=True, kw_only=True)
class AcceptOptions(DraftTreeOptions, ImplementationOptions, DraftLimitOptions, JsonOptions):
    """Options of specsim accept."""

    # Target model: a folder, a hub id, or tiny, the shipped one. Measures one setting of this pair.
    target: Annotated[str | None, common("Model", default="study of the shipped drafters", file="reads")] = None
    # Drafter's weights: a folder or a hub id.
    draft: Annotated[str | None, common("Model", default="of --drafter", file="reads")] = None
    # Drafter: {names}, or MODULE:NAME of your own; may be repeated. With --target also a folder or hub id of weights.
    drafter: Annotated[
        list[str] | None,
        common(
            "Model",
            names=", ".join(sorted(KINDS, key=lambda name: name != DEFAULT)),
            values="NAME",
            default="all shipped ones",
            file="reads",
        ),
    ] = None
    # File of prompts, a text per line or JSON Lines; or a number of shipped prompts, and of edits.
    prompts: Annotated[
        str | None,
        common("Requests", limits="at least 1", values="FILE|N", default="all shipped ones", file="reads"),
    ] = None
    # Largest number of new tokens per prompt.
    max_new_tokens: Annotated[int, common("Requests", at_least=1)] = 64
    # Sampling temperature; 0 is greedy.
    temperature: Annotated[NonNegativeNumber, common("Sampling")] = 0.0
    # Random seed.
    seed: Annotated[Seed, option("Sampling")] = 0
    # Requests that run at once.
    batch: Annotated[BatchSize | None, option("Execution", default="16")] = None
    # Processes that share the study's runs.
    jobs: Annotated[JobCount, common("Execution")] = 1
    # Earlier record, or metrics of an engine, that the accept length is compared with.
    baseline: Annotated[str | None, common("Answers", values="FILE", file="reads")] = None
    # Relative loss that is no regression.
    tolerance: Annotated[float | None, common("Answers", limits="0 to 1", default="0.02")] = None
    # Draw acceptance by position to this PNG file.
    plot: Annotated[Path | None, common("Output", file="writes")] = None

    def drafter_and_weights(self) -> tuple[str | None, str | None]:
        """Give the kind of the drafter and its weights; a name that is no kind is that of weights."""
        from specsim.models.load import split_lookup

        names = self.drafter or []
        require(len(names) <= 1, "drafter", ", ".join(names), "one drafter with --target")
        name = names[0] if names else None
        require(name != "none", "drafter", name, "a drafter: plain decoding has no drafts")
        if name is None or split_lookup(name)[0] in KINDS or ":" in name:
            return name, self.draft
        if self.draft is not None:
            raise InputError("drafter", name, "a kind of drafter with --draft, which names the weights")
        return None, name

    def texts(self) -> "list[Prompt]":
        """Read the prompts of a file, or the shipped ones."""
        from specsim.acceptance.measured_pair import read_prompts

        if self.prompts is None or self.prompts.isdecimal():
            return list(shipped_texts(_count(self.prompts)))
        return read_prompts(Path(self.prompts))


_OF_STUDY = ("drafter", "prompts", "max_new_tokens", "jobs", "json")


def accept(options: AcceptOptions) -> None:
    """Measure the accept length of a pair, or of all shipped ones.

    With --target it measures one setting on your prompts, and --json writes an acceptance record, which plan,
    simulate, predict and lint-report take. The interval is a bootstrap over requests. With --draft-vocab or
    --draft-window it measures the pair without them too, and compares.

    Without --target it studies the shipped drafters: a chain of 3 and a tree, at temperature 0 and 1, on the held-out
    prompts. Those without weights also run on edits, prompts that end within a copy of an excerpt. All drafters on all
    prompts take some 30 minutes of CPU time.

    Exit status: 0 when done, 1 if the accept length fell by more than the tolerance with 95 % confidence, or if an
    output of the study at temperature 0 differs from plain decoding's, 2 for bad input, 3 if a process is lost.

    Examples:
      specsim accept --target tiny --json record.json
      specsim accept --target tiny --baseline record.json
      specsim accept --drafter ngram --drafter my_drafter.py:SameAgain --prompts 5
    """
    SamplingParams(max_new_tokens=options.max_new_tokens)
    if options.target is not None:
        require(options.jobs == 1, "jobs", options.jobs, "1 with --target, whose requests run in one batch")
        accept_pair(options, options.target)
        return
    refuse_others(options, _OF_STUDY, "without --target")
    _study(options)


def _study(options: AcceptOptions) -> None:
    """Study shipped drafters."""
    from specsim.acceptance.settings import DRAFTERS, settings_of
    from specsim.acceptance.study import measure, show
    from specsim.models.load import load_shipped

    count = _count(options.prompts)
    drafters = list(dict.fromkeys(options.drafter or DRAFTERS))
    settings = [setting for name in drafters for setting in settings_of(name)]
    for name in drafters:
        load_shipped(name)  # bad input, if any, is refused before the first run
    texts = {"prompts": shipped_texts(count), "edits": shipped_texts(None, "edits")[:count]}
    study = measure(load_shipped, texts, options.max_new_tokens, settings, options.jobs, progress=True)
    report("accept", lambda console: show(study, console), study.to_json(), options.json, study.is_lossless)


def _count(prompts: str | None) -> int | None:
    """Read a number of shipped prompts."""
    if prompts is None:
        return None
    try:
        return int(prompts)
    except ValueError:
        raise InputError("prompts", prompts, "a number of shipped prompts; a file goes with --target") from None


def accept_pair(options: AcceptOptions, target: str) -> None:
    """Measure a pair, report the record, and compare it with a baseline."""
    from specsim.acceptance.baseline import TOLERANCE, compare
    from specsim.acceptance.files import read_record
    from specsim.acceptance.measured_pair import BATCH, measure_pair
    from specsim.acceptance.record_prediction import show_record
    from specsim.models.draft_cost import draft_cost
    from specsim.models.load import drafts_on_host, load, load_config

    config = pick(SpecConfig, options)
    require(not config.is_plain, "num_steps", config.num_steps, "at least 1: plain decoding has no drafts")
    sampling = pick(SamplingParams, options)
    tolerance = options.tolerance
    earlier = None if options.baseline is None else read_record(options.baseline, "baseline")
    require(tolerance is None or earlier, "tolerance", tolerance, "nothing without --baseline")
    require(tolerance is None or 0 <= tolerance < 1, "tolerance", tolerance, "a relative loss from 0 up to 1")
    check_png(options.plot)
    prompts = options.texts()
    kind, draft = options.drafter_and_weights()
    engine_options = options.engine_options(config, drafts_on_host=drafts_on_host(kind, config))
    config.within(load_config(target, draft, kind).max_position_embeddings)
    unlimited = load(target, draft, kind, options.draft_fields())
    pair = options.limited(unlimited)
    settings = (prompts, config, sampling, engine_options, options.batch or BATCH)
    if earlier is None and pair is not unlimited:
        earlier = measure_pair(unlimited, *settings, progress=True)
    record = measure_pair(pair, *settings, progress=True)
    record = replace(record, source=command_line("accept", options, ("baseline", "tolerance")))
    compared = None if earlier is None else compare(record, earlier, TOLERANCE if tolerance is None else tolerance)

    def print_all(console: "Console") -> None:
        show_record(record, console)
        if compared is not None:
            from specsim.core.display import paragraph

            console.print()
            if options.baseline is None:
                cost, all_cost = (draft_cost(measured, config.num_steps) for measured in (pair, unlimited))
                paragraph(console, f"A draft reads {cost:.1%} of the target's weights, {all_cost:.1%} with all tokens.")
                paragraph(console, "The baseline is the same drafter with all of its tokens and keys:")
            paragraph(console, str(compared))

    try:
        report("acceptance", print_all, record.to_json(), options.json)
    finally:
        if options.plot is not None:
            write_whole(options.plot, png("acceptance_rates", {record.pair: record}), "plot")
    if options.baseline is not None and compared is not None and compared.is_regression:
        raise click.exceptions.Exit(1)
