"""The persistent forward and the kernels side by side: rounds and verify forwards over the context length."""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from specsim.bench.contest import contest, roofline_target
from specsim.bench.roofline import Peaks, forward_bound, round_bound
from specsim.bench.round_checks import check_round, tensors_of
from specsim.bench.rounds import forward_contender
from specsim.bench.row import OURS, BenchRow, Check, all_of, equal
from specsim.bench.scale import INVENTED, PLAIN, SPECULATIVE, random_pools, repeated_round
from specsim.bench.scene import DRAFTER, Scene, close, invented, stacked, tree_of
from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.models.shapes import random_pair, shape
from specsim.serving.generation import load_engine

KERNELS = "kernels"
LENGTHS = (1024, 8192, 32768)
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=SPECULATIVE.page_size)
SAMPLES = 9
FORWARD_LIMIT = 1.25


@dataclass(frozen=True, slots=True)
class TimedRounds:
    """Rounds of one setting: label, (requests, length) of each batch, and largest time over roofline bound."""

    label: str
    config: SpecConfig
    batches: tuple[tuple[int, int], ...]
    limit: float | None = None  # with one, forwards of trees are timed too


ALONE = (
    TimedRounds("plain decode", PLAIN, tuple((1, length) for length in LENGTHS), 1.17),
    TimedRounds(f"{DRAFTER} round", SPECULATIVE, tuple((1, length) for length in LENGTHS), 1.28),
)
TOGETHER = (
    TimedRounds(
        "plain decode", PLAIN, tuple((requests, length) for requests in (2, 4, 8, 16) for length in LENGTHS[:2])
    ),
    TimedRounds(
        f"{DRAFTER} round", CHAIN, tuple((requests, length) for requests in (1, 2, 4) for length in LENGTHS[:2])
    ),
    TimedRounds(f"{DRAFTER} round", SPECULATIVE, tuple((2, length) for length in LENGTHS[:2])),
)


def persistent_rows(name: str, peaks: Peaks, full: bool, quick: bool) -> Iterator[BenchRow]:
    """Time both forwards in one run, after checks of each.

    full: several requests too. quick: only the first batch of a setting.
    """
    model_shape = shape(name)
    longest = max(model_shape.config.max_position_embeddings, LENGTHS[-1] + 256)
    model_shape = replace(model_shape, config=replace(model_shape.config, max_position_embeddings=longest))
    pair = stacked(random_pair(model_shape, "cuda", torch.bfloat16))
    for rounds in (*ALONE, *(TOGETHER if full else ())):
        rounds_pair = replace(pair, drafter=None) if rounds.config.is_plain else pair
        yield from _rows_of(replace(rounds, batches=rounds.batches[:1]) if quick else rounds, rounds_pair, peaks)
        gc.collect()
        torch.cuda.empty_cache()


def _rows_of(rounds: TimedRounds, pair: Pair, peaks: Peaks) -> Iterator[BenchRow]:
    """Time rounds, and forwards of trees, over pools of random KV that both engines use."""
    config = rounds.config
    kernels = EngineOptions("fast", torch.bfloat16, "cuda", "round", forward="kernels")
    engines = {
        OURS: load_engine(pair, config, replace(kernels, forward="persistent")),
        KERNELS: load_engine(pair, config, kernels),
    }
    slots = max(requests * config.reserved_columns(length + 64) for requests, length in rounds.batches)
    pools = random_pools(engines[OURS], max(requests for requests, _ in rounds.batches), slots)
    for requests, length in rounds.batches:
        scene = invented(pair, engines[KERNELS], pools, requests, length)
        scenes = {who: replace(scene, engine=engine) for who, engine in engines.items()}
        try:
            row = _round_row(rounds, scenes, requests, length, peaks)
            yield row
            if not config.is_plain and rounds.limit is not None:
                yield _forward_row(scenes, row.checks, requests, length, peaks)
        finally:
            close(scene)


def checked(scene: Scene) -> Check:
    """Check a round by an independent forward and the reference, and against itself bit for bit."""
    again = equal("twice the same round, bit for bit", tensors_of(scene.round()), tensors_of(scene.round()))
    round_ = check_round(scene, with_eager=False)
    return all_of(f"{round_.compared}; {again.compared}", round_, again)


def _round_row(rounds: TimedRounds, scenes: dict[str, Scene], requests: int, length: int, peaks: Peaks) -> BenchRow:
    pair = scenes[OURS].pair
    drafter = pair.checkpoint and pair.checkpoint.config
    bound = round_bound(pair.target.config, drafter, rounds.config, requests, length)
    contenders = [repeated_round(who, scene, checked, SAMPLES) for who, scene in scenes.items()]
    setting = {"requests": requests, "L": length, "tree": tree_of(rounds.config)}
    set_targets = None if rounds.limit is None else roofline_target(rounds.limit)
    return contest(rounds.label, setting, contenders, bound, peaks, set_targets=set_targets, notes=[INVENTED])


def _forward_row(
    scenes: dict[str, Scene], checks: Mapping[str, Check], requests: int, length: int, peaks: Peaks
) -> BenchRow:
    """Time the target's forward over a tree, logits included; each has to give its checked round's logits."""
    verify_input = scenes[KERNELS].round().verify_input
    target = scenes[KERNELS].pair.target.config
    nodes = scenes[KERNELS].engine.config.num_draft_tokens
    contenders = [forward_contender(who, scenes[who], verify_input, check) for who, check in checks.items()]
    setting = {"requests": requests, "L": length, "nodes": nodes}
    bound = forward_bound(target, requests, nodes, length)
    set_targets = roofline_target(FORWARD_LIMIT)
    return contest("verify forward", setting, contenders, bound, peaks, set_targets=set_targets, notes=[INVENTED])
