"""Whole rounds of a model of real shape with random weights: device time, host time, launches, synchronisations."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from specsim.bench.clock import launched, replayed, timing
from specsim.bench.contest import Contender, contest, roofline_target
from specsim.bench.roofline import Peaks, forward_bound, round_bound
from specsim.bench.round_checks import autoregressive, check_round
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing, all_of, equal
from specsim.bench.scene import DRAFTER, PLAIN, SPECULATIVE, Scene, prefilled, stacked, tree_of
from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.core.phases import VerifyInput
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.models.shapes import random_pair, random_prompts
from specsim.serving.generation import load_engine

SEQ_LEN = 1024
MOST_REQUESTS = 16
RATES = (0.8, 0.6, 0.4)  # of synthetic acceptance, by position
MOST_LAUNCHES = 1.0
RANDOM = "random weights: no draft but chance is accepted, which changes what is committed, not what is read"
# Name, setting, temperature, and target of time over roofline bound.
ROUNDS = (
    ("plain decode", PLAIN, 0.0, 1.20),
    (f"{DRAFTER} round", SPECULATIVE, 0.0, 1.30),
    (f"{DRAFTER} round, T=1", SPECULATIVE, 1.0, None),
)
FORWARDS = ((8, 1.25), (64, 1.40))  # draft tokens and limit of verify forwards


def round_rows(shape: str, peaks: Peaks, quick: bool) -> Iterator[BenchRow]:
    """Time rounds at one request of SEQ_LEN tokens, on the device and on the host."""
    pair = stacked(random_pair(shape, "cuda", torch.bfloat16))
    for name, config, temperature, limit in ROUNDS[: 2 if quick else None]:
        scene = scene_of(pair, config, temperature)
        row = round_row(name, scene, peaks, limit)
        yield row
        yield host_row(f"{name}, host", row.setting, scene, row.checks[OURS])
        del scene
        torch.cuda.empty_cache()
    if not quick:
        yield synthetic_row(pair, peaks)


def forward_rows(shape: str, peaks: Peaks) -> Iterator[BenchRow]:
    """Time verify forwards without the rest of a round."""
    pair = stacked(random_pair(shape, "cuda", torch.bfloat16))
    for nodes, limit in FORWARDS:
        yield forward_row(pair, nodes, peaks, limit)
        torch.cuda.empty_cache()


def invariance_rows(shape: str, quick: bool) -> Iterator[BenchRow]:
    """Measure the cost of batch_invariant for a round, solo and batched."""
    pair = stacked(random_pair(shape, "cuda", torch.bfloat16))
    for requests in (1,) if quick else (1, MOST_REQUESTS):
        yield invariance_row(pair, requests)
        torch.cuda.empty_cache()


def scene_of(
    pair: Pair,
    config: SpecConfig,
    temperature: float = 0.0,
    requests: int = 1,
    batch_invariant: bool = False,
    acceptance: SyntheticAcceptance | None = None,
) -> Scene:
    """Prefill requests of SEQ_LEN random tokens; rounds run in one graph."""
    plain = replace(pair, drafter=None) if config.is_plain else pair
    options = EngineOptions("fast", torch.bfloat16, "cuda", "round", requests, batch_invariant)
    engine = load_engine(plain, config, options, acceptance=acceptance)
    prompts = random_prompts(MOST_REQUESTS, SEQ_LEN, pair.target.config.vocab_size)[:requests]
    return prefilled(plain, engine, prompts, temperature)


def round_row(name: str, scene: Scene, peaks: Peaks, limit: float | None) -> BenchRow:
    """Time consecutive rounds on the device, gaps between graphs included, per round."""
    config = scene.engine.config
    pair = scene.pair
    bound = round_bound(
        pair.target.config, pair.checkpoint and pair.checkpoint.config, config, scene.batch.size, SEQ_LEN
    )
    check = cache(lambda _: check_round(scene))
    us = Contender(OURS, lambda _: None, check, lambda: consecutive(scene))
    graph = Contender(f"{OURS}, graph replay only", lambda _: None, check, lambda: replayed(scene.replay, 30))
    setting = {"requests": scene.batch.size, "tree": tree_of(config), "L": SEQ_LEN}
    set_targets = roofline_target(limit) if limit else None
    return contest(name, setting, (us, graph), bound, peaks, set_targets=set_targets, notes=[RANDOM])


def synthetic_row(pair: Pair, peaks: Peaks) -> BenchRow:
    """Time the speculative round under scheduled acceptance: the cost of a token at these rates."""
    acceptance = SyntheticAcceptance(RATES)
    scene = scene_of(pair, SPECULATIVE, acceptance=acceptance)
    row = round_row(f"{DRAFTER} round, synthetic acceptance", scene, peaks, None)
    counts = [float(verdict.num_accepted_tokens[0]) for verdict in scene.following(3 * CONSECUTIVE)]
    accepted = sum(counts) / len(counts)
    notes = (f"acceptance: {acceptance}: not the target's, nor are the tokens", f"{accepted:.2f} tokens a round")
    if OURS in row.timings:
        notes += (f"{row.ours_us / accepted:,.0f} us a token",)
    return replace(row, notes=(*row.notes[1:], *notes))


def consecutive(scene: Scene) -> Timing:
    """Time CONSECUTIVE rounds by events, per round."""
    return replayed(lambda: scene.rounds(CONSECUTIVE), SAMPLES, CONSECUTIVE)


def launch_rows(shape: str) -> Iterator[BenchRow]:
    """Count the host's launches of a round in a profile.

    This group is the last: a profiler slows all later launches.
    """
    pair = stacked(random_pair(shape, "cuda", torch.bfloat16))
    for name, config, temperature, _ in ROUNDS[:2]:
        scene = scene_of(pair, config, temperature)
        check = check_round(scene)
        targets = ()
        notes = ()
        if check.passed:
            graphs, others = launches(scene)
            targets = (PerformanceTarget("graph launches a round", graphs, MOST_LAUNCHES),)
            notes = (f"and {others:g} other launches and copies",)
        setting = {"requests": 1, "tree": tree_of(config), "L": SEQ_LEN}
        yield BenchRow(f"{name}, launches", setting, {OURS: check}, targets=targets, notes=notes)


def forward_row(pair: Pair, nodes: int, peaks: Peaks, limit: float) -> BenchRow:
    """Time the target's forward over a tree, logits included, without the rest of a round."""
    steps, topk = (3, 4) if nodes <= 8 else (6, 8)
    scene = scene_of(pair, SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=nodes))
    us = forward_contender(OURS, scene, scene.round().verify_input, check_round(scene))
    bound = forward_bound(pair.target.config, 1, nodes, SEQ_LEN)
    setting = {"requests": 1, "nodes": nodes, "L": SEQ_LEN}
    return contest("verify forward", setting, (us,), bound, peaks, set_targets=roofline_target(limit))


def forward_contender(who: str, scene: Scene, verify_input: VerifyInput, round_check: Check) -> Contender:
    """Make a contender of the forward over these trees, timed in its own graph.

    The round that it belongs to is checked, and its logits have to equal that round's bit for bit.
    """
    from specsim.fast.model.metadata import tree_metadata

    engine = scene.engine

    @torch.inference_mode()
    def forward() -> torch.Tensor:
        metadata = tree_metadata(scene.batch, verify_input, scene.pools)
        ids = verify_input.draft_tokens.view(-1)
        output = engine.target.forward(ids, metadata, scene.pools.target, engine.drafter.feature_layers)
        return engine.target.logits(output.hidden)

    def check(logits: torch.Tensor) -> Check:
        expected = {"logits": scene.round().verify_output.target_logits}
        same = equal("the round's logits, bit for bit", {"logits": logits}, expected)
        return all_of(round_check.compared, round_check, same)

    return Contender(who, lambda _: forward(), check, lambda: launched(lambda _: forward(), 1, 30, 1))


def invariance_row(pair: Pair, requests: int) -> BenchRow:
    """Time a round with and without batch_invariant.

    Both are checked like any round, and the first request has to be equal solo and batched, bit for bit.
    """
    scenes = {
        OURS: scene_of(pair, SPECULATIVE, requests=requests, batch_invariant=True),
        f"{OURS}, without the option": scene_of(pair, SPECULATIVE, requests=requests),
    }
    checks = {name: check_round(scene) for name, scene in scenes.items()}
    if requests > 1:
        solo, batched = (
            _first_request(scene) for scene in (scene_of(pair, SPECULATIVE, batch_invariant=True), scenes[OURS])
        )
        same = equal("solo and batched, bit for bit", batched, solo)
        checks[OURS] = all_of(f"{checks[OURS].compared}; {same.compared}", checks[OURS], same)
    timings = {name: consecutive(scene) for name, scene in scenes.items() if checks[name].passed}
    notes = [RANDOM]
    if len(timings) == len(scenes):
        with_it, without = (timing.median_us for timing in timings.values())
        notes.append(f"the option costs {with_it / without - 1:+.1%}")
    setting = {"requests": requests, "tree": tree_of(SPECULATIVE), "L": SEQ_LEN}
    return BenchRow(f"{DRAFTER} round, batch-invariant", setting, checks, timings, notes=tuple(notes))


def _first_request(scene: Scene) -> dict[str, torch.Tensor]:
    """Collect the results of a round for its first request."""
    output = scene.round()
    nodes = scene.engine.config.num_draft_tokens
    verdict = output.verify_output.verdict
    following = autoregressive(output.draft_input)  # of a speculative round
    return {
        "draft tokens": output.verify_input.draft_tokens[0],
        "target logits": output.verify_output.target_logits[:nodes],
        "logprobs": verdict.logprobs[0],
        "hidden state": following.hidden[0],
        "first drafts": following.topk_index[0],
    }


CONSECUTIVE = 8  # rounds, each enqueued before the last one has ended
SAMPLES = 15
MOST_HOST_US = 100.0


def host_row(name: str, setting: Mapping[str, Any], scene: Scene, round_check: Check) -> BenchRow:
    """Time the host on a checked round until all is enqueued, and check that it never waits."""
    check = all_of("the round's own check, and that the host never waits", round_check, _without_waiting(scene))
    timings = {}
    targets = ()
    notes = ()
    if check.passed:
        timings[OURS], first = host_times(scene)
        targets = (PerformanceTarget("host time, us", timings[OURS].median_us, MOST_HOST_US),)
        notes = (f"{first:.0f} us after an idle device",)
    return BenchRow(name, setting, {OURS: check}, timings, targets=targets, notes=notes)


def _without_waiting(scene: Scene) -> Check:
    """Check CONSECUTIVE rounds under torch's sync debug mode, which raises where the host would wait."""
    compared = f"no synchronisation in {CONSECUTIVE} consecutive rounds (torch's sync debug mode)"
    scene.rounds(CONSECUTIVE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scene.rounds(CONSECUTIVE)
    except RuntimeError as error:
        return Check(compared, 1, 0, str(error).strip().splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return Check(compared, 0, 0)


def host_times(scene: Scene) -> tuple[Timing, float]:
    """Measure the wall-clock time until a round is enqueued: of later rounds, and of the first.

    The first follows an idle device.
    """
    first = []
    others = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        before = time.perf_counter()
        for index, _ in enumerate(scene.following(CONSECUTIVE)):
            now = time.perf_counter()
            (others if index else first).append(1e6 * (now - before))
            before = now
    torch.cuda.synchronize()
    return timing(others), timing(first).median_us


def launches(scene: Scene) -> tuple[float, float]:
    """Count (graph launches, other launches and copies) a round by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        scene.rounds(CONSECUTIVE)
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profiler.key_averages()}
    graphs = sum(count for key, count in counts.items() if key.startswith(("cudaGraphLaunch", "cuGraphLaunch")))
    kinds = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpy", "cudaMemset")
    others = sum(count for key, count in counts.items() if key.startswith(kinds))
    return graphs / CONSECUTIVE, others / CONSECUTIVE
