"""Growth of plain decoding and speculative rounds over requests and context, each setting with its roofline bound."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from specsim.bench.clock import replayed
from specsim.bench.contest import Contender, contest, roofline_target
from specsim.bench.roofline import Peaks, round_bound
from specsim.bench.round_checks import check_round
from specsim.bench.row import OURS, BenchRow, Check
from specsim.bench.scene import Scene, close, invented, stacked, tree_of
from specsim.core.config import SpecConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.kinds import DEFAULT
from specsim.core.pair import Pair
from specsim.core.pool import KVPool
from specsim.models.shapes import random_pair, shape
from specsim.serving.generation import load_engine

MOST_TOKENS = 900_000
MOST_RATIO = 1.6
LONGEST = 131_072
REQUESTS = (1, 4, 16, 64, 256)
LENGTHS = (1024, 4096, 16384, 65536, LONGEST)
ALL_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ALL_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, LONGEST)
PAGE_SIZE = 16
ROUNDS = 4
SAMPLES = 5
PLAIN = SpecConfig.plain(PAGE_SIZE)
SPECULATIVE = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=PAGE_SIZE)
INVENTED = "KV is random, as is the first draft; pages are the pool's, no prompt was prefilled"


def points(full: bool) -> list[tuple[int, int]]:
    """List (requests, length) of the grid, and the longest length that fits, by number of requests."""
    requests, lengths = (ALL_REQUESTS, ALL_LENGTHS) if full else (REQUESTS, LENGTHS)
    grid = {(count, length) for count in requests for length in lengths if count * length <= MOST_TOKENS}
    corners = {(count, min(LONGEST, MOST_TOKENS // count // PAGE_SIZE * PAGE_SIZE)) for count in requests}
    return sorted(grid | corners, key=lambda point: (point[0], point[1]))


def scale_rows(name: str, config: SpecConfig, peaks: Peaks, full: bool, quick: bool) -> Iterator[BenchRow]:
    """Time every setting whose columns fit into the free memory; quick: only short ones."""
    model_shape = shape(name)
    longer = replace(model_shape.config, max_position_embeddings=LONGEST + PAGE_SIZE)
    long = replace(model_shape, config=longer.with_heads(rope=replace(longer.rope, scaling={})))
    pair = stacked(random_pair(long, "cuda", torch.bfloat16, None if config.is_plain else DEFAULT))
    chosen = [point for point in points(full) if not quick or point[0] * point[1] <= 70_000]
    yield from _rows_of(pair, config, chosen, peaks)
    del pair
    gc.collect()
    torch.cuda.empty_cache()


def _rows_of(pair: Pair, config: SpecConfig, chosen: list[tuple[int, int]], peaks: Peaks) -> Iterator[BenchRow]:
    """Time settings in one pool, as large as the largest of those that fit into the free memory."""
    # One kind of forward for all settings, as the simulator has one efficiency for them.
    engine = load_engine(pair, config, EngineOptions("fast", torch.bfloat16, "cuda", "round", forward="kernels"))
    slots = min(max(_slots(engine, *point) for point in chosen), _room(pair))
    chosen = [point for point in chosen if _slots(engine, *point) <= slots]
    pools = random_pools(engine, max(requests for requests, _ in chosen), slots)
    for requests, length in chosen:
        yield _row(pair, engine, pools, requests, length, peaks)


def random_pools(engine: Engine, requests: int, slots: int) -> KVPool:
    """Make pools of random KV."""
    pools = engine.make_pools(requests, slots)
    for kv in (pools.target, pools.draft):
        for part in () if kv is None else (*kv.keys, *kv.values):
            part.normal_()
    return pools


def repeated_round(who: str, scene: Scene, check: Callable[[Scene], Check], samples: int) -> Contender:
    """Make a contender of a round that is enqueued ROUNDS times at once."""
    repeat = partial(scene.again, ROUNDS)
    return Contender(who, lambda _: None, lambda _: check(scene), lambda: replayed(repeat, samples, ROUNDS))


def _slots(engine: Engine, requests: int, length: int) -> int:
    return requests * engine.config.reserved_columns(length)


def _room(pair: Pair) -> int:
    """Count the slots that fit, with twelve gigabytes left for the buffers and the check of a round."""
    models = [pair.target.config, *([pair.checkpoint.config.model] if pair.checkpoint else [])]
    numbers = sum(2 * model.num_layers * model.num_kv_heads * model.head_dim for model in models)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return (free - 12 * 2**30) // (2 * numbers)


def _row(pair: Pair, engine: Engine, pools: KVPool, requests: int, length: int, peaks: Peaks) -> BenchRow:
    scene = invented(pair, engine, pools, requests, length)
    drafter = pair.checkpoint and pair.checkpoint.config
    bound = round_bound(pair.target.config, drafter, engine.config, requests, length)
    check = partial(check_round, requests=sorted({0, requests - 1}), with_eager=False)
    us = repeated_round(OURS, scene, check, SAMPLES)
    setting = {"requests": requests, "L": length, "tree": tree_of(engine.config)}
    try:
        set_targets = roofline_target(MOST_RATIO)
        return contest("growth", setting, (us,), bound, peaks, set_targets=set_targets, notes=[INVENTED])
    finally:
        close(scene)
