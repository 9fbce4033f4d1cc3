"""One request end to end, against the best of transformers: plain, and speculative at a synthetic accept length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from specsim.bench.baselines import (
    ASSISTANTS,
    FIRST_LAYER,
    ITSELF,
    SAMPLES,
    STATIC,
    Ours,
    TransformersModel,
    likeliest,
    modes_of,
)
from specsim.bench.clock import walled
from specsim.bench.contest import Contender, Targets, contest
from specsim.bench.roofline import Peaks, RooflineBound, forward_bound
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing, all_of
from specsim.bench.scene import DRAFTER, PLAIN, stacked
from specsim.core.config import SpecConfig
from specsim.core.pair import Pair
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.models.shapes import random_pair, random_prompts

CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)  # every depth is in its tree, so rates are kept
TOKENS = 128
PROMPT = 128
ACCEPTED = (0.85, 0.65, 0.5)  # synthetic rates: an accept length of 3.0
LEAST_PLAIN, LEAST_SPECULATIVE = 1.8, 4.0  # times as fast as the best of transformers
SYNTHETIC = (
    "acceptance is synthetic, its tokens are not the target's; the times of transformers are those of the row above"
)


def shaped_rows(shape: str, peaks: Peaks) -> Iterator[BenchRow]:
    """Time a model of real shape in bf16: plain decoding, and drafts at a synthetic accept length of 3.0."""
    pair = stacked(random_pair(shape, "cuda", torch.bfloat16))
    (prompt,) = random_prompts(1, PROMPT, pair.target.config.vocab_size)
    yield from end_to_end_rows(shape, pair, prompt, TOKENS, peaks)
    del pair
    torch.cuda.empty_cache()


def end_to_end_rows(name: str, pair: Pair, prompt: Sequence[int], count: int, peaks: Peaks) -> Iterator[BenchRow]:
    """Time one request in bf16 on the wall clock, prefill included, in microseconds per token.

    The first row waits for no compilation of transformers; the others repeat its times, as all are of one run.
    """
    on = torch.bfloat16, pair.target.tensors["lm_head.weight"].device.type
    plain = Ours(pair, PLAIN, prompt, count, *on)
    expected = plain()
    check = likeliest(pair, prompt)
    theirs = TransformersModel(pair, prompt, count, *on)
    notes = [ASSISTANTS]
    modes = {who: partial(theirs, **options) for who, options in modes_of(theirs).items()}
    contenders = [Contender(OURS, lambda _: expected, check, lambda: walled(plain, SAMPLES, count))]
    contenders += [_compared(who, run, expected, check, notes) for who, run in modes.items() if who != STATIC]
    bound = forward_bound(pair.target.config, 1, 1, len(prompt) + count // 2)
    setting = {"prompt": len(prompt), "tokens": count, "dtype": "bfloat16"}
    row = contest(f"generation, plain, {name}, nothing of transformers compiled", setting, contenders, bound, peaks)
    yield replace(row, notes=(*notes, *row.notes))
    contenders = [*_again(row), _compared(STATIC, modes[STATIC], expected, check, notes)]
    row = contest(f"generation, plain, {name}", setting, contenders, bound, peaks, set_targets=_gain(LEAST_PLAIN))
    yield replace(row, notes=(*notes, *row.notes))
    real = Ours(pair, CHAIN, prompt, count, *on)
    drafting = Ours(pair, CHAIN, prompt, count, *on, SyntheticAcceptance(ACCEPTED))
    lossless = check(real())
    compared = f"without synthetic acceptance, {lossless.compared}"
    us = Contender(
        OURS,
        lambda _: drafting(),
        lambda tokens: all_of(compared, lossless, _has_accepted(drafting, tokens)),
        lambda: walled(drafting, SAMPLES, count),
    )
    contenders = [us, *(contender for contender in _again(row) if contender.name != OURS)]
    title = f"generation, {DRAFTER} at an accept length of {1 + sum(ACCEPTED):.1f}, {name}"
    yield contest(title, setting, contenders, bound, peaks, set_targets=_gain(LEAST_SPECULATIVE), notes=[SYNTHETIC])


def _again(row: BenchRow) -> list[Contender]:
    """Make contenders of a row with its checks and times."""
    return [
        Contender(who, lambda _: None, lambda _, who=who: row.checks[who], lambda who=who: row.timings[who])
        for who in row.checks
    ]


def _compared(
    who: str, run: Callable[[], list[int]], expected: list[int], check: Callable[[list[int]], Check], notes: list[str]
) -> Contender:
    """Make a contender that notes how many of its first tokens are ours."""
    tokens: list[int] = []
    times: list[Timing] = []

    def first(_: int) -> list[int]:
        times.append(walled(lambda: tokens.extend(run()), 1, len(expected)))
        return tokens

    def noted(tokens: list[int]) -> Check:
        equal = next(
            (index for index, pair in enumerate(zip(tokens, expected, strict=False)) if len(set(pair)) > 1), None
        )
        count = len(expected) if equal is None else equal
        notes.append(f"{who}: the first {count} of {len(expected)} tokens are ours")
        return check(tokens)

    def time() -> Timing:
        if who in (FIRST_LAYER, ITSELF):  # after the kernels of eager generation, and for seconds
            return times[0]
        return walled(run, SAMPLES if who == STATIC else 1, len(expected))

    return Contender(who, first, noted, time)


def _gain(least: float) -> Targets:
    """Set the target of our time over that of the best baseline."""

    def targets(times: Mapping[str, float], bound: RooflineBound, peaks: Peaks) -> list[PerformanceTarget]:
        theirs = [us for who, us in times.items() if who.startswith("transformers")]
        name = f"time / best of transformers ({least:g} times as fast)"
        return [PerformanceTarget(name, times[OURS] / min(theirs), 1 / least)] if theirs else []

    return targets


def _has_accepted(ours: Ours, tokens: list[int]) -> Check:
    """Check a synthetic run's number of tokens, and its accept length.

    Its rounds that accept i + 1 drafts are as many as the rates say, but for less than i + 1: in all for less than 6.
    """
    expected = 1 + sum(ACCEPTED)
    length = sum(ours.accepted) / max(1, len(ours.accepted))
    is_complete = len(tokens) == ours.count
    difference = "" if is_complete else f"{len(tokens)} tokens, not {ours.count}"
    return Check("accept length of the synthetic rates", abs(length - expected) * len(ours.accepted), 6, difference)
