"""Gain of each graph mode over the one before it, in rounds of the shipped pair at one request."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

import torch

from specsim.bench.clock import walled
from specsim.bench.row import OURS, Asked, Check, Row, Timing
from specsim.bench.scene import Scene, prefilled, tree_of
from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.models.load import load
from specsim.models.shipped import load_prompts
from specsim.serving.generation import load_engine

Mode = Literal["eager", "step", "phase", "round"]
MODES: tuple[Mode, ...] = ("eager", "step", "phase", "round")
EAGLE3 = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8)
ROUNDS = 16
SAMPLES = 9
ENQUEUED = f"{OURS}, enqueued"
Rounds = list[list[int]]  # tokens of each round


def mode_rows() -> Iterator[Row]:
    """Plain decoding and the graph modes in float32 at one request, each against the mode before it."""
    pair = load()
    prompt = pair.tokenizer.encode(load_prompts()[0]["text"])
    plain = _scene(replace(pair, drafter=None), SpecConfig.plain(), "round", prompt)
    expected = _accepted(plain, ROUNDS * 4)
    times: dict[str, float] = {}
    yield _mode_row("plain", plain, expected, expected, times)
    first = None
    for mode in MODES:
        scene = _scene(pair, EAGLE3, mode, prompt)
        found = _accepted(scene, ROUNDS)
        first = first or found
        yield _mode_row(mode, scene, found, expected, times, first)


def _scene(pair: Pair, config: SpecConfig, mode: Mode, prompt: Sequence[int]) -> Scene:
    return prefilled(pair, load_engine(pair, config, EngineOptions("fast", torch.float32, "cuda", mode, 1)), [prompt])


def _accepted(scene: Scene, rounds: int) -> Rounds:
    """Give the tokens of each of `rounds` rounds."""
    return [verdict.accepted_tokens()[0] for verdict in scene.following(rounds)]


def _mode_row(
    mode: str, scene: Scene, found: Rounds, plain: Rounds, times: dict[str, float], first: Rounds | None = None
) -> Row:
    """Time rounds that the host reads one by one, and rounds that are only enqueued; tokens are plain decoding's."""
    tokens = list(chain.from_iterable(found))
    reference = list(chain.from_iterable(plain))[: len(tokens)]
    what = "tokens of plain decoding" + (" and rounds of the first mode" if first else "")
    same = tokens[: len(reference)] == reference and (first is None or found == first)
    check = Check(what, float(not same), 0, "" if same else f"{tokens[:8]}…, not {reference[:8]}…")
    timings: dict[str, Timing] = {}
    asked: list[Asked] = []
    if check.passed:
        timings[OURS] = walled(lambda: _accepted(scene, ROUNDS), SAMPLES, ROUNDS)
        timings[ENQUEUED] = walled(lambda: scene.rounds(ROUNDS), SAMPLES, ROUNDS)
        slower = next(iter(reversed([each for each in times if each != "plain"])), None)
        if slower:
            asked.append(Asked(f"time / {slower}", timings[OURS].median_us / times[slower], 1.0))
        times[mode] = timings[OURS].median_us
    per_round = len(tokens) / len(found)
    notes = (f"{per_round:.2f} tokens a round",)
    if timings:
        notes += (f"{timings[OURS].median_us / per_round:.0f} us a token",)
    setting = {"graph": "round" if mode == "plain" else mode, "tree": tree_of(scene.engine.config), "dtype": "float32"}
    checks: dict[str, Check] = {OURS: check, ENQUEUED: check}
    return Row(f"shipped pair, {mode}", setting, checks, timings, asked=tuple(asked), notes=notes)
