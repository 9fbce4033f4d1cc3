"""Times of the graph modes: rounds of the shipped pair at one request."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch

from specsim.bench.clock import interleaved_times
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing, all_of, equal
from specsim.bench.scene import SPECULATIVE, Scene, prefilled, tree_of
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.models.load import load
from specsim.models.shipped import load_prompts
from specsim.serving.generation import generate, load_engine
from specsim.serving.outputs import Generation

TOGETHER = 64
ALONE = 4
NEW_TOKENS = 32


def sameness_rows(quick: bool) -> Iterator[BenchRow]:
    """Compare tokens of GPU and CPU, of two runs, solo and batched; no times."""
    pair = load()
    count = 8 if quick else TOGETHER
    texts = (TOGETHER * [prompt["text"] for prompt in load_prompts()])[:count]
    run = partial(_generate, pair)
    batched = run(texts)
    again = run(texts)
    yield _row("two runs", {"requests": count}, _equal("tokens and logprobs, bit for bit", batched, again))
    indices = range(min(ALONE, count))
    on_cpu = generate(pair, [texts[index] for index in indices], SPECULATIVE, _PARAMS, request_ids=list(indices))
    yield _row(
        "GPU and CPU", {"requests": len(indices)}, same_tokens("tokens of the reference, float32", batched, on_cpu)
    )
    solo = [run([texts[index]], [index]) for index in indices]
    checks = [same_tokens(f"request {index}", batched, output, index) for index, output in enumerate(solo)]
    bits = sum(_equal("", batched, output, index).passed for index, output in enumerate(solo))
    note = f"logprobs are equal bit for bit, too, in {bits} of {len(solo)}"
    yield _row("solo and batched", {"requests": count}, all_of("tokens", *checks), (note,))
    yield from _invariant_rows(pair, texts, indices)


_PARAMS = SamplingParams(max_new_tokens=NEW_TOKENS)


def _generate(
    pair: Pair, texts: Sequence[str], ids: Sequence[int] | None = None, batch_invariant: bool = False
) -> Generation:
    ids = list(range(len(texts)) if ids is None else ids)
    options = EngineOptions("fast", device="cuda", batch_invariant=batch_invariant)
    return generate(pair, texts, SPECULATIVE, _PARAMS, request_ids=ids, engine=options)


def _row(name: str, setting: dict[str, Any], check: Check, notes: tuple[str, ...] = ()) -> BenchRow:
    return BenchRow(f"shipped pair, {name}", setting | {"dtype": "float32"}, {OURS: check}, notes=notes)


def _tensors(generation: Generation, index: int) -> dict[str, torch.Tensor]:
    output = generation.outputs[index]
    logprobs = torch.tensor(output.logprobs, dtype=torch.float64)
    return {"tokens": torch.tensor(output.token_ids), "logprobs": logprobs}


def _equal(compared: str, generation: Generation, expected: Generation, first: int = 0) -> Check:
    """Compare outputs bit for bit; place 0 of `expected` is place `first` of `found`."""
    indices = range(len(expected.outputs))
    return all_of(compared, *(equal(compared, _tensors(generation, first + i), _tensors(expected, i)) for i in indices))


def same_tokens(compared: str, generation: Generation, expected: Generation, first: int = 0) -> Check:
    """Compare tokens of requests; entry 0 of `expected` is entry `first` of `generation`."""
    pairs = [(generation.outputs[first + i].token_ids, output.token_ids) for i, output in enumerate(expected.outputs)]
    wrong = [index for index, (ours, theirs) in enumerate(pairs) if ours != theirs]
    return Check(compared, float(len(wrong)), 0, f"requests {wrong}" if wrong else "")


def _invariant_rows(pair: Pair, texts: Sequence[str], indices: Sequence[int]) -> Iterator[BenchRow]:
    """Compare solo and batched outputs under `batch_invariant`, bit for bit."""
    run = partial(_generate, pair, batch_invariant=True)
    batched = run(texts)
    checks = [_equal(f"request {index}", batched, run([texts[index]], [index]), index) for index in indices]
    compared = "tokens and logprobs solo and batched, bit for bit"
    yield _row("batch-invariant", {"requests": len(texts)}, all_of(compared, *checks))


Mode = Literal["eager", "step", "phase", "round"]
MODES: tuple[Mode, ...] = ("eager", "step", "phase", "round")
ROUNDS = 16
SAMPLES = 15
PLAIN = "plain"
ENQUEUED = f"{OURS}, enqueued"
Rounds = list[list[int]]  # tokens of each round


def mode_rows() -> Iterator[BenchRow]:
    """Time plain decoding and the graph modes, in float32 at one request, each after its check."""
    pair = load()
    prompt = pair.tokenizer.encode(load_prompts()[0]["text"])
    plain = _scene(replace(pair, drafter=None), SpecConfig.plain(), "round", prompt)
    scenes = {PLAIN: plain} | {mode: _scene(pair, SPECULATIVE, mode, prompt) for mode in MODES}
    yield from compared(scenes, ROUNDS)


def compared(scenes: Mapping[str, Scene], rounds: int) -> Iterator[BenchRow]:
    """Make a row per mode, plain decoding first; a mode that fails its check has no time."""
    tokens_by_mode = {mode: _accepted(scene, rounds * (4 if mode == PLAIN else 1)) for mode, scene in scenes.items()}
    expected = list(chain.from_iterable(tokens_by_mode[PLAIN]))
    first = next(tokens for mode, tokens in tokens_by_mode.items() if mode != PLAIN)
    checks = {
        mode: _check(tokens, expected, None if mode == PLAIN else first) for mode, tokens in tokens_by_mode.items()
    }
    passed = {mode: scene for mode, scene in scenes.items() if checks[mode].passed}
    read = interleaved_times(
        {mode: partial(_accepted, scene, rounds) for mode, scene in passed.items()}, SAMPLES, rounds
    )
    enqueued = interleaved_times(
        {mode: partial(scene.rounds, rounds) for mode, scene in passed.items()}, SAMPLES, rounds
    )
    for mode, scene in scenes.items():
        timings = {OURS: read[mode], ENQUEUED: enqueued[mode]} if mode in passed else {}
        per_round = sum(map(len, tokens_by_mode[mode])) / len(tokens_by_mode[mode])
        notes = (f"{per_round:.2f} tokens a round",)
        if timings:
            notes += (f"{read[mode].median_us / per_round:.0f} us a token",)
        setting = {"graph": scene.engine.options.graph, "tree": tree_of(scene.engine.config), "dtype": "float32"}
        both = {OURS: checks[mode], ENQUEUED: checks[mode]}
        yield BenchRow(f"shipped pair, {mode}", setting, both, timings, targets=_targets(mode, read), notes=notes)


def _check(rounds: Rounds, plain: list[int], first: Rounds | None) -> Check:
    """Compare tokens with those of plain decoding, and rounds with those of the first graph mode."""
    tokens = list(chain.from_iterable(rounds))
    reference = plain[: len(tokens)]
    compared = "tokens of plain decoding" + (" and rounds of the first mode" if first else "")
    same = tokens[: len(reference)] == reference and (first is None or rounds == first)
    return Check(compared, float(not same), 0, "" if same else f"{tokens[:8]}…, not {reference[:8]}…")


def _targets(mode: str, times: Mapping[str, Timing]) -> tuple[PerformanceTarget, ...]:
    """Targets of a mode: a recorded step saves time, and the default is as fast as the best."""
    graphs = {name: mode_time.median_us for name, mode_time in times.items() if name != PLAIN}
    if mode == "step" and {"step", "eager"} <= graphs.keys():
        return (PerformanceTarget("time / eager", graphs["step"] / graphs["eager"], 1.0),)
    if mode == "round" and mode in graphs:
        return (PerformanceTarget("time / best graph mode", graphs[mode] / min(graphs.values()), 1.02),)
    return ()


def _scene(pair: Pair, config: SpecConfig, mode: Mode, prompt: Sequence[int]) -> Scene:
    return prefilled(pair, load_engine(pair, config, EngineOptions("fast", torch.float32, "cuda", mode, 1)), [prompt])


def _accepted(scene: Scene, rounds: int) -> Rounds:
    """Collect the tokens of each of `rounds` rounds."""
    return [verdict.accepted_tokens()[0] for verdict in scene.following(rounds)]
