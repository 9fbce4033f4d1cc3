"""Acceptance study: acceptance of a target's drafters on its prompts, compared with targets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from tqdm.auto import tqdm

from specsim.acceptance.settings import SETTINGS, TARGETS, TARGETS_FRESH, PromptSet, StudySetting
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.display import by_position, figure, heading, paragraph, print_table
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import require, require_int
from specsim.core.metrics import LOOP_SHARE, Acceptance, is_loop
from specsim.core.pair import Pair
from specsim.core.workers import Workers, finished
from specsim.serving.generation import generate
from specsim.serving.outputs import Generation, Output

LEAST_PROMPTS = 40
LEAST_NEW_TOKENS = 64
Prompts = Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Acceptance of one setting."""

    setting: StudySetting
    everything: Acceptance  # acceptance over all prompts of the set
    fresh: Acceptance  # acceptance over those whose greedy continuation does not loop
    num_equal: int | None  # outputs at temperature 0 that equal plain decoding's token for token


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """A measured figure and its target."""

    claim: str  # the figure, in words
    measured: float  # measured value
    target: str  # target, in words
    reached: bool  # whether the target is reached


@dataclass(frozen=True, slots=True)
class Study:
    """Acceptance of many settings on the same prompts."""

    num_prompts: int  # number of held-out prompts
    num_fresh: int  # those whose greedy continuation does not loop
    max_new_tokens: int  # new tokens of each prompt
    measurements: tuple[Measurement, ...]  # acceptance by setting
    checks: tuple[TargetCheck, ...]  # figures and their targets
    num_edits: int = 0  # prompts of the repetitive set, 0 if no setting runs on it
    num_fresh_edits: int = 0  # edits whose greedy continuation does not loop

    def num_outputs(self, setting: StudySetting) -> int:
        """Count the outputs of a setting."""
        return self.num_edits if setting.prompt_set == "edits" else self.num_prompts

    @property
    def greedy(self) -> list[Measurement]:
        return [row for row in self.measurements if row.num_equal is not None]

    @property
    def is_lossless(self) -> bool:
        """Whether every greedy output equals plain decoding's."""
        return all(row.num_equal == self.num_outputs(row.setting) for row in self.greedy)

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return asdict(self)


def measure(
    load_pair: Callable[[str], Pair],
    prompt_sets: Mapping[str, Prompts],
    max_new_tokens: int = LEAST_NEW_TOKENS,
    settings: Sequence[StudySetting] = SETTINGS,
    jobs: int = 1,
    progress: bool = False,
) -> Study:
    """Run every setting on all prompts of its set, in `jobs` processes.

    load_pair: gives the pair with a drafter, the target always the same; with more than one job it has to be a function
    of a module. prompt_sets: `prompts`, and `edits` if a setting names it. All prompts of a set run in one batch, so
    their order has no influence on drafters that learn from finished requests, as `suffix` does. In float64, so that
    rounding decides no greedy token. End tokens are ignored, so that every prompt has the same weight.
    """
    require(settings, "settings", settings, "at least one setting")
    require_int("jobs", jobs)
    has_edits = any(setting.prompt_set == "edits" for setting in settings)
    names: tuple[PromptSet, ...] = ("prompts", "edits") if has_edits else ("prompts",)
    plain_runs = [StudySetting(settings[0].drafter, SpecConfig.plain(), prompt_set=name) for name in names]
    run = partial(_generation, load_pair, prompt_sets, max_new_tokens)
    results = _results((*plain_runs, *settings), run, jobs, progress)
    plain = dict(zip(names, results[: len(names)], strict=True))
    both = zip(settings, results[len(names) :], strict=True)
    rows = tuple(_row(setting, result, plain[setting.prompt_set]) for setting, result in both)
    fresh = {name: sum(map(_is_fresh, result.outputs)) for name, result in plain.items()}
    study = Study(
        num_prompts=len(prompt_sets["prompts"]),
        num_fresh=fresh["prompts"],
        max_new_tokens=max_new_tokens,
        measurements=rows,
        checks=(),
        num_edits=len(prompt_sets["edits"]) if has_edits else 0,
        num_fresh_edits=fresh.get("edits", 0),
    )
    return replace(study, checks=tuple(_checks(study)))


def _generation(
    load_pair: Callable[[str], Pair], prompt_sets: Mapping[str, Prompts], max_new_tokens: int, setting: StudySetting
) -> Generation:
    """Run a setting with a pair of its own, so that no drafter's state goes from run to run."""
    sampling = SamplingParams(temperature=setting.temperature, max_new_tokens=max_new_tokens, ignore_eos=True)
    pair = load_pair(setting.drafter)
    prompts = prompt_sets[setting.prompt_set]
    return generate(pair, prompts, setting.config, sampling, engine=EngineOptions(dtype=torch.float64))


def _results(
    settings: Sequence[StudySetting], run: Callable[[StudySetting], Generation], jobs: int, progress: bool
) -> list[Generation]:
    """Give the results in the order of the settings; each of several processes uses one thread."""
    calls = {index: partial(run, setting) for index, setting in enumerate(settings)}
    results = {}
    with tqdm(total=len(calls), unit="run", disable=None if progress else True) as bar:
        if jobs == 1:
            for index, call in calls.items():
                results[index] = call()
                bar.update()
        else:
            with Workers(min(jobs, len(calls)), partial(torch.set_num_threads, 1)) as workers:
                for index, result in finished(workers, calls, lambda index: f"the run of {_title(settings[index])}"):
                    results[index] = result
                    bar.update()
    return [results[index] for index in calls]


def _title(setting: StudySetting) -> str:
    return f"{setting}, {setting.conditions}"


def _is_fresh(output: Output) -> bool:
    return not is_loop(output.token_ids)


def _row(setting: StudySetting, generation: Generation, plain: Generation) -> Measurement:
    both = list(zip(generation.outputs, plain.outputs, strict=True))
    fresh = replace(generation, outputs=tuple(output for output, greedy in both if _is_fresh(greedy)))
    num_equal = sum(output.token_ids == greedy.token_ids for output, greedy in both)
    return Measurement(setting, generation.acceptance, fresh.acceptance, None if setting.temperature else num_equal)


def _checks(study: Study) -> Iterator[TargetCheck]:
    yield _at_least("prompts", study.num_prompts, LEAST_PROMPTS)
    yield _at_least("new tokens a prompt", study.max_new_tokens, LEAST_NEW_TOKENS)
    yield _at_least("prompts whose greedy continuation does not loop", study.num_fresh, study.num_prompts / 2)
    for group, suffix, targets in (("everything", "", TARGETS), ("fresh", ", no loop", TARGETS_FRESH)):
        for wanted, least in targets:
            for row in study.measurements:
                if row.setting == wanted:
                    claim = f"{_title(wanted)}{suffix}: accept length"
                    yield _at_least(claim, getattr(row, group).accept_length, least)
    yield from _tree_checks(study.measurements)
    outputs = sum(study.num_outputs(row.setting) for row in study.greedy)
    equal = sum(row.num_equal or 0 for row in study.greedy)
    yield TargetCheck("greedy outputs equal to plain decoding's", equal, f"all {outputs}", study.is_lossless)


def _at_least(claim: str, measured: float, least: float) -> TargetCheck:
    return TargetCheck(claim, measured, f"at least {least:g}", measured >= least)


def _tree_checks(rows: Sequence[Measurement]) -> Iterator[TargetCheck]:
    """Compare each tree with its drafter's best chain of as many steps or fewer, on the same prompts."""
    drafted = [row for row in rows if row.everything.rounds]  # a lookup may find no draft at all
    for tree in (row for row in drafted if not row.setting.is_chain):
        steps = tree.setting.config.num_steps
        alike = [row for row in drafted if row.setting == replace(tree.setting, config=row.setting.config)]
        chains = [row for row in alike if row.setting.is_chain and row.setting.config.num_steps <= steps]
        if chains:
            measured = tree.everything.accept_length
            best = max(row.everything.accept_length for row in chains)
            target = f"above {best:.2f}, the best chain's"
            claim = f"{_title(tree.setting)}: accept length"
            yield TargetCheck(claim, measured, target, measured > best)


def show(study: Study, console: Console) -> None:
    """Print the study: a row per setting, then the checks."""
    heading(console, f"Acceptance on {study.num_prompts} held-out prompts, {study.max_new_tokens} new tokens each")
    edits = (
        f" {study.num_edits} edits end within a copy of an excerpt with one identifier renamed; "
        f"{study.num_fresh_edits} do not loop."
    )
    paragraph(
        console,
        f"{study.num_fresh} do not loop: {LOOP_SHARE:.0%} or more of the 4-grams of their plain greedy "
        f"continuation are distinct.{edits if study.num_edits else ''} Length: mean tokens a round, bonus included; "
        "no loop: over the prompts that do not loop. Rate: accepted drafts over the proposed depth. By position: share "
        "of the rounds that accepted at least 1, 2, ... drafts. A tree is named by topk, steps, draft tokens.",
    )
    if any(row.setting.drafter == "suffix" for row in study.measurements):
        paragraph(
            console, "Suffix drafts use finished outputs of the batch: their figures depend on the other prompts."
        )
    console.print()
    columns = ("setting", "T", "prompts", "rounds", "length", "no loop", "rate", "accepted by position")
    print_table(console, columns, list(map(_cells, study.measurements)))
    heading(console, "Targets")
    print_table(console, ("", "measured", "target", "reached"), list(map(_check_cells, study.checks)))


def _check_cells(check: TargetCheck) -> tuple[str, ...]:
    digits = 0 if isinstance(check.measured, int) else 3
    return check.claim, figure(check.measured, digits), check.target, "yes" if check.reached else "NO"


def _cells(row: Measurement) -> tuple[str, ...]:
    group = "edits" if row.setting.prompt_set == "edits" else "held-out"
    named = (str(row.setting), f"{row.setting.temperature:g}", group)
    lengths = (figure(row.everything.accept_length), figure(row.fresh.accept_length))
    rates = (figure(row.everything.accept_rate), by_position(row.everything.accepted_by_position))
    return *named, figure(row.everything.rounds, 0), *lengths, *rates
