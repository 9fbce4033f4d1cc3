"""Acceptance study: acceptance of a pair's drafters on its prompts, compared with targets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from tqdm.auto import tqdm

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.display import by_position, figure, heading, paragraph, print_table, short_setting
from specsim.core.engine_options import EngineOptions
from specsim.core.metrics import LOOP_SHARE, Acceptance, is_loop
from specsim.core.pair import Pair
from specsim.serving.generation import Generation, Output, generate

LEAST_PROMPTS = 40
LEAST_NEW_TOKENS = 64
NAMES = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of the study."""

    drafter: str
    config: SpecConfig
    temperature: float = 0.0

    @property
    def is_chain(self) -> bool:
        return self.config.topk == 1

    def __str__(self) -> str:
        return f"{NAMES[self.drafter]} {short_setting(self.config)}"


def chain(num_drafts: int) -> SpecConfig:
    """Make the setting of a chain of drafts, the root and all of them verified."""
    return SpecConfig(topk=1, num_steps=num_drafts, num_draft_tokens=num_drafts + 1)


TREE = SpecConfig(topk=4, num_steps=4, num_draft_tokens=16)
SETTINGS = (
    *(Setting("eagle3", chain(num_drafts)) for num_drafts in range(1, 6)),
    Setting("eagle3", TREE),
    Setting("eagle3", chain(3), temperature=1.0),
    Setting("eagle3", chain(4), temperature=1.0),
    Setting("eagle3", TREE, temperature=1.0),
    Setting("eagle", chain(3)),
    Setting("eagle", chain(3), temperature=1.0),
)


class Target(NamedTuple):
    """A setting and the least accept length that it should reach."""

    setting: Setting
    accept_length: float


TARGETS = (
    Target(Setting("eagle3", chain(3)), 3.2),
    Target(Setting("eagle3", chain(3), temperature=1.0), 1.7),
    Target(Setting("eagle", chain(3)), 2.5),
)
TARGETS_FRESH = (Target(Setting("eagle3", chain(3)), 2.3),)  # over prompts whose continuation does not loop


@dataclass(frozen=True, slots=True)
class Measurement:
    """Acceptance of one setting."""

    setting: Setting
    everything: Acceptance  # over all prompts
    fresh: Acceptance  # over those whose greedy continuation does not loop
    num_equal: int | None  # outputs at temperature 0 that equal plain decoding's token for token


@dataclass(frozen=True, slots=True)
class Check:
    """A measured figure and its target."""

    claim: str
    measured: float
    target: str  # in words
    reached: bool


@dataclass(frozen=True, slots=True)
class Study:
    """Acceptance of many settings on the same prompts."""

    num_prompts: int
    num_fresh: int  # prompts whose greedy continuation does not loop
    max_new_tokens: int
    measurements: tuple[Measurement, ...]
    checks: tuple[Check, ...]

    @property
    def is_lossless(self) -> bool:
        """Whether every greedy output equals plain decoding's."""
        return all(row.num_equal in (None, self.num_prompts) for row in self.measurements)

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return asdict(self)


def measure(
    pairs: Mapping[str, Pair],
    prompts: Sequence[str] | Sequence[Sequence[int]],
    max_new_tokens: int = LEAST_NEW_TOKENS,
    settings: Sequence[Setting] = SETTINGS,
    progress: bool = False,
) -> Study:
    """Run every setting on all prompts.

    pairs: by drafter, all of the same target. In float64, so that rounding decides no greedy token. End tokens are
    ignored, so that every prompt has the same weight.
    """
    bar = tqdm(total=len(settings) + 1, unit="run", disable=None if progress else True)

    def run(pair: Pair, config: SpecConfig, temperature: float) -> Generation:
        bar.update()
        sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, ignore_eos=True)
        return generate(pair, prompts, config, sampling, engine=EngineOptions(dtype=torch.float64))

    plain = run(next(iter(pairs.values())), SpecConfig.plain(), 0.0)
    rows = tuple(_row(each, run(pairs[each.drafter], each.config, each.temperature), plain) for each in settings)
    bar.close()
    num_fresh = sum(_is_fresh(output) for output in plain.outputs)
    study = Study(len(prompts), num_fresh, max_new_tokens, rows, ())
    return replace(study, checks=tuple(_checks(study)))


def _is_fresh(output: Output) -> bool:
    return not is_loop(output.token_ids)


def _row(setting: Setting, generation: Generation, plain: Generation) -> Measurement:
    both = list(zip(generation.outputs, plain.outputs, strict=True))
    fresh = replace(generation, outputs=tuple(output for output, greedy in both if _is_fresh(greedy)))
    num_equal = sum(output.token_ids == greedy.token_ids for output, greedy in both)
    return Measurement(setting, generation.acceptance, fresh.acceptance, None if setting.temperature else num_equal)


def _checks(study: Study) -> Iterator[Check]:
    yield _at_least("prompts", study.num_prompts, LEAST_PROMPTS)
    yield _at_least("new tokens a prompt", study.max_new_tokens, LEAST_NEW_TOKENS)
    yield _at_least("prompts whose greedy continuation does not loop", study.num_fresh, study.num_prompts / 2)
    for group, suffix, targets in (("everything", "", TARGETS), ("fresh", ", no loop", TARGETS_FRESH)):
        for wanted, least in targets:
            for row in study.measurements:
                if row.setting == wanted:
                    claim = f"{wanted}, T={wanted.temperature:g}{suffix}: accept length"
                    yield _at_least(claim, getattr(row, group).accept_length, least)
    yield from _tree_checks(study.measurements)
    greedy = [row.num_equal for row in study.measurements if row.num_equal is not None]
    outputs = len(greedy) * study.num_prompts
    yield Check("greedy outputs equal to plain decoding's", sum(greedy), f"all {outputs}", study.is_lossless)


def _at_least(claim: str, measured: float, least: float) -> Check:
    return Check(claim, measured, f"at least {least:g}", measured >= least)


def _tree_checks(rows: Sequence[Measurement]) -> Iterator[Check]:
    """Compare the tree with the best chain of as many steps or fewer, at the same temperature."""
    for tree in (row for row in rows if not row.setting.is_chain):
        steps = tree.setting.config.num_steps
        temperature = tree.setting.temperature
        chains = [row for row in rows if row.setting.is_chain and row.setting.temperature == temperature]
        lengths = [row.everything.accept_length for row in chains if row.setting.config.num_steps <= steps]
        if lengths:
            measured = tree.everything.accept_length
            best = max(lengths)
            target = f"above {best:.2f}, the best chain's"
            yield Check(f"{tree.setting}, T={temperature:g}: accept length", measured, target, measured > best)


def show(study: Study, console: Console) -> None:
    """Print the study: a row per setting and group of prompts, then the checks."""
    heading(console, f"Acceptance on {study.num_prompts} held-out prompts, {study.max_new_tokens} new tokens each")
    paragraph(
        console,
        f"{study.num_fresh} do not loop: {LOOP_SHARE:.0%} or more of the 4-grams of their plain greedy "
        "continuation are distinct. Length: mean tokens a round, bonus included. Rate: accepted drafts over num_steps. "
        "By position: share of the rounds that accepted at least 1, 2, ... drafts. "
        "A tree is named by topk, steps, draft tokens.",
    )
    console.print()
    columns = ("setting", "T", "prompts", "rounds", "length", "rate", "accepted by position")
    print_table(console, columns, [cells for row in study.measurements for cells in _cells(row)])
    heading(console, "Targets")
    print_table(console, ("", "measured", "target", "reached"), list(map(_check_cells, study.checks)))


def _check_cells(check: Check) -> tuple[str, ...]:
    digits = 0 if isinstance(check.measured, int) else 3
    return check.claim, figure(check.measured, digits), check.target, "yes" if check.reached else "NO"


def _cells(row: Measurement) -> Iterator[tuple[str, ...]]:
    named = (str(row.setting), f"{row.setting.temperature:g}")
    for (setting, temperature), group, figures in ((named, "all", row.everything), (("", "-"), "no loop", row.fresh)):
        lengths = (figure(figures.rounds, 0), figure(figures.accept_length), figure(figures.accept_rate))
        yield setting, temperature, group, *lengths, by_position(figures.accepted_by_position)
