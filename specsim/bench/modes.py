"""Times of the graph modes: rounds of the shipped pair at one request."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal

import torch

from specsim.bench.clock import in_turns
from specsim.bench.row import OURS, Check, Row, Target, Timing
from specsim.bench.scene import EAGLE3, Scene, prefilled, tree_of
from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.models.load import load
from specsim.models.shipped import load_prompts
from specsim.serving.generation import load_engine

Mode = Literal["eager", "step", "phase", "round"]
MODES: tuple[Mode, ...] = ("eager", "step", "phase", "round")
ROUNDS = 16
SAMPLES = 15
PLAIN = "plain"
ENQUEUED = f"{OURS}, enqueued"
Rounds = list[list[int]]  # tokens of each round


def mode_rows() -> Iterator[Row]:
    """Time plain decoding and the graph modes, in float32 at one request, each after its check."""
    pair = load()
    prompt = pair.tokenizer.encode(load_prompts()[0]["text"])
    plain = _scene(replace(pair, drafter=None), SpecConfig.plain(), "round", prompt)
    scenes = {PLAIN: plain} | {mode: _scene(pair, EAGLE3, mode, prompt) for mode in MODES}
    yield from compared(scenes, ROUNDS)


def compared(scenes: Mapping[str, Scene], rounds: int) -> Iterator[Row]:
    """Make a row per mode, plain decoding first; a mode that fails its check has no time."""
    found = {mode: _accepted(scene, rounds * (4 if mode == PLAIN else 1)) for mode, scene in scenes.items()}
    expected = list(chain.from_iterable(found[PLAIN]))
    first = next(tokens for mode, tokens in found.items() if mode != PLAIN)
    checks = {mode: _check(tokens, expected, None if mode == PLAIN else first) for mode, tokens in found.items()}
    passed = {mode: scene for mode, scene in scenes.items() if checks[mode].passed}
    read = in_turns({mode: partial(_accepted, scene, rounds) for mode, scene in passed.items()}, SAMPLES, rounds)
    enqueued = in_turns({mode: partial(scene.rounds, rounds) for mode, scene in passed.items()}, SAMPLES, rounds)
    for mode, scene in scenes.items():
        timings = {OURS: read[mode], ENQUEUED: enqueued[mode]} if mode in passed else {}
        per_round = sum(map(len, found[mode])) / len(found[mode])
        notes = (f"{per_round:.2f} tokens a round",)
        if timings:
            notes += (f"{read[mode].median_us / per_round:.0f} us a token",)
        setting = {"graph": scene.engine.options.graph, "tree": tree_of(scene.engine.config), "dtype": "float32"}
        both = {OURS: checks[mode], ENQUEUED: checks[mode]}
        yield Row(f"shipped pair, {mode}", setting, both, timings, targets=_targets(mode, read), notes=notes)


def _check(found: Rounds, plain: list[int], first: Rounds | None) -> Check:
    """Compare tokens with those of plain decoding, and rounds with those of the first graph mode."""
    tokens = list(chain.from_iterable(found))
    reference = plain[: len(tokens)]
    compared = "tokens of plain decoding" + (" and rounds of the first mode" if first else "")
    same = tokens[: len(reference)] == reference and (first is None or found == first)
    return Check(compared, float(not same), 0, "" if same else f"{tokens[:8]}…, not {reference[:8]}…")


def _targets(mode: str, times: Mapping[str, Timing]) -> tuple[Target, ...]:
    """Targets of a mode: a recorded step saves time, and the default is as fast as the best."""
    graphs = {name: each.median_us for name, each in times.items() if name != PLAIN}
    if mode == "step" and {"step", "eager"} <= graphs.keys():
        return (Target("time / eager", graphs["step"] / graphs["eager"], 1.0),)
    if mode == "round" and mode in graphs:
        return (Target("time / best graph mode", graphs[mode] / min(graphs.values()), 1.02),)
    return ()


def _scene(pair: Pair, config: SpecConfig, mode: Mode, prompt: Sequence[int]) -> Scene:
    return prefilled(pair, load_engine(pair, config, EngineOptions("fast", torch.float32, "cuda", mode, 1)), [prompt])


def _accepted(scene: Scene, rounds: int) -> Rounds:
    """Collect the tokens of each of `rounds` rounds."""
    return [verdict.accepted_tokens()[0] for verdict in scene.following(rounds)]
