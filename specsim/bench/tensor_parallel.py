"""Rounds on one GPU and on several that share the model, after equality checks, and the simulator's expectation.

Every rank runs this program. Ranks agree on each check and on each time, so that all go the same way.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from specsim.bench.checks import all_of, equal
from specsim.bench.clock import launched
from specsim.bench.dense import eagle3_of
from specsim.bench.expected_rounds import Expected, expected, expected_exchange
from specsim.bench.host import CONSECUTIVE
from specsim.bench.round_checks import check_round
from specsim.bench.rounds import RANDOM, SEQ_LEN, consecutive
from specsim.bench.row import OURS, Check, Row, Target, Timing
from specsim.bench.scene import EAGLE3, Scene, prefilled, stacked, tree_of
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.pair import Pair
from specsim.core.rank_group import RankGroup, digests
from specsim.models.shapes import random_pair, random_prompts
from specsim.serving.generation import load_engine

SLICE = "llama-2-70b-tp2-slice"  # half of a model that one GPU does not hold
REQUESTS = (1, 16)
MOST_RATIO = {1: 0.66, 16: 0.64}  # of the times on two GPUs and on one, by requests
ONE = "one GPU"
LIBRARY = "NCCL"
WIDTH = 4096  # of a row in bf16
PART_ROWS = (1, 8, 16, 64, 128, 512)
MOST_BYTES = 40e9  # of weights that a GPU holds twice, for the comparison with eager kernels
EXCHANGES = (
    "nccl",
    "_exchange_kernel",
    "_exchanged_sum_kernel",
    "_sum_kernel",
)  # parts of kernels' names, in lower case
Time = Callable[[Scene], Timing]


def joined(size: int) -> RankGroup:
    """Find the ranks that run this suite together."""
    ranks = RankGroup.joined(size)
    if ranks is None:
        raise InputError("tensor_parallel", size, "at least 2 for the suite tensor-parallel")
    return ranks


def exchange_rows(size: int, quick: bool) -> Iterator[Row]:
    """Time sums over ranks by size: by NCCL, and through the memory of the other GPUs."""
    from specsim.fast.model.rank_sums import MOST_BYTES as LARGEST
    from specsim.fast.model.rank_sums import links
    from specsim.fast.runtime.peer_memory import LinkedRanks

    ranks = joined(size)
    found = links(ranks.size)
    ways = {LIBRARY: ranks}
    if isinstance(found.peers, str) or found.reason:
        note = f"rounds exchange all parts by {LIBRARY}: {found.reason}"
    else:
        ways = {OURS: LinkedRanks(ranks.rank, ranks.size, ranks.board, found.peers, LARGEST), **ways}
        note = f"rounds exchange parts of up to {found.most_bytes:,} bytes through the memory of the other GPUs"
    for rows in PART_ROWS[:: 2 if quick else 1]:
        yield exchange_row(ranks, ways, rows, note)


@torch.inference_mode()
def exchange_row(ranks: RankGroup, ways: dict[str, RankGroup], rows: int, note: str) -> Row:
    """Compare the bits of each way's sum with a sum in the order of the ranks, and time it."""
    from specsim.fast.model.rank_sums import sum_onto

    parts = [_part(rank, rows) for rank in range(ranks.size)]
    total = parts[0].float()
    for each in parts[1:]:
        total += each.float()
    expected_sum = {"sum": total.to(parts[0].dtype)}
    part = parts[ranks.rank]
    checks = {}
    timings = {}
    for name, way in ways.items():
        run = partial(sum_onto, way, None, part)
        check = equal("the sum in the order of the ranks, bit for bit", {"sum": run().values}, expected_sum)
        checks[name] = agreed(ranks, check)
        if checks[name].passed:
            timings[name] = slowest(ranks, launched(lambda _, run=run: run(), 1, 20))
    theirs = expected_exchange(ranks.size, part.nbytes)
    notes = (note, *([] if theirs is None else [f"the simulator's term: {1e6 * theirs:.1f} us"]))
    return Row("sum over ranks", {"GPUs": ranks.size, "bytes": part.nbytes}, checks, timings, notes=notes)


def _part(rank: int, rows: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rank)
    return torch.randn(rows, WIDTH, generator=generator, device="cuda").to(torch.bfloat16)


def round_rows(shape: str, size: int, quick: bool) -> Iterator[Row]:
    """Time EAGLE-3 rounds of two shapes, on one GPU and on all."""
    ranks = joined(size)
    for name in (shape,) if quick else (shape, SLICE):
        pair = stacked(random_pair(name, "cuda", torch.bfloat16))
        for requests in REQUESTS[: 1 if quick else None]:
            yield round_row(name, pair, requests, ranks)
            torch.cuda.empty_cache()
        del pair
        torch.cuda.empty_cache()


def round_row(
    name: str, pair: Pair, requests: int, ranks: RankGroup, device: str = "cuda", time: Time = consecutive
) -> Row:
    """Time rounds of these requests on all ranks and on one, each after its check."""
    checks: dict[str, Check] = {}
    timings: dict[str, Timing] = {}
    is_small = sum(tensor.nbytes for tensor in pair.target.tensors.values()) <= MOST_BYTES
    for who, size in ((OURS, ranks.size), (ONE, 1)):
        scene = scene_on(pair, requests, size, device)
        check = check_round(scene, with_eager=is_small and requests == 1)
        if who == OURS:
            same = same_on_all(ranks, scene)
            check = all_of(f"{check.compared}; {same.compared}", check, same)
        checks[who] = agreed(ranks, check)
        if checks[who].passed:
            timings[who] = slowest(ranks, time(scene))
        del scene
    setting = {"shape": name, "GPUs": ranks.size, "requests": requests, "tree": tree_of(EAGLE3), "L": SEQ_LEN}
    targets = ()
    notes = [RANDOM]
    if len(timings) == 2:
        ratio = timings[OURS].median_us / timings[ONE].median_us
        limit = MOST_RATIO.get(requests)
        is_target = ranks.size == 2 and limit is not None
        targets = (Target("time on two GPUs / time on one", ratio, limit or 0.0),) if is_target else ()
        vocab_size = eagle3_of(pair).config.draft_vocab_size
        of_simulator = expected(pair.target.config, vocab_size, ranks.size, requests, EAGLE3, SEQ_LEN)
        notes += [] if of_simulator is None else [compared(of_simulator, ratio)]
    return Row("EAGLE-3 round on several GPUs", setting, checks, timings, targets=targets, notes=tuple(notes))


def compared(of_simulator: Expected, ratio: float) -> str:
    """Compare a measured ratio of times with the simulator's."""
    return (
        f"the simulator: {of_simulator.ratio:.3f} of the time on one GPU ({ratio / of_simulator.ratio - 1:+.1%} here), "
        f"{1e6 * of_simulator.exchanges:,.0f} us of exchanges, {of_simulator.share:.1%} of its round"
    )


def share_rows(shape: str, size: int, quick: bool) -> Iterator[Row]:
    """Find the share of exchanges in a round's kernels, by a profile.

    This group is the last: a profiler slows all later launches.
    """
    ranks = joined(size)
    for name in (shape,) if quick else (shape, SLICE):
        pair = stacked(random_pair(name, "cuda", torch.bfloat16))
        for requests in REQUESTS[: 1 if quick else None]:
            scene = scene_on(pair, requests, ranks.size)
            check = agreed(ranks, same_on_all(ranks, scene))
            seconds = _kernel_us(scene) if check.passed else {}
            yield share_row(name, requests, ranks, check, ranks.gather_objects(seconds))
            del scene
            torch.cuda.empty_cache()
        del pair
        torch.cuda.empty_cache()


def share_row(shape: str, requests: int, ranks: RankGroup, check: Check, by_rank: list[dict[str, float]]) -> Row:
    """Name the exchanges' share of the kernel times of every rank; it includes the wait for the other ranks."""
    notes = []
    for rank, kernels in enumerate(by_rank):
        spent = sum(us for name, us in kernels.items() if any(part in name.lower() for part in EXCHANGES))
        total = sum(kernels.values())
        if total:
            notes.append(
                f"rank {rank}: exchanges {spent:,.0f} of {total:,.0f} us of kernels a round, {spent / total:.1%}"
            )
    setting = {"shape": shape, "GPUs": ranks.size, "requests": requests, "tree": tree_of(EAGLE3), "L": SEQ_LEN}
    return Row("exchanges of a round", setting, {OURS: check}, notes=tuple(notes))


def _kernel_us(scene: Scene) -> dict[str, float]:
    """Profile rounds: microseconds of every kernel in one round, by name."""
    from torch.profiler import ProfilerActivity, profile

    scene.rounds(1)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        scene.rounds(CONSECUTIVE)
        torch.cuda.synchronize()
    events: Any = profiler.key_averages()
    return {each.key: each.self_device_time_total / CONSECUTIVE for each in events if each.self_device_time_total}


def scene_on(pair: Pair, requests: int, size: int, device: str = "cuda") -> Scene:
    """Prefill requests of SEQ_LEN random tokens on `size` ranks; a round is one graph on each."""
    options = EngineOptions("fast", torch.bfloat16, device, "round", requests, tensor_parallel=size)
    engine = load_engine(pair, EAGLE3, options)
    prompts = random_prompts(max(REQUESTS), SEQ_LEN, pair.target.config.vocab_size)[:requests]
    return prefilled(pair, engine, prompts)


def same_on_all(ranks: RankGroup, scene: Scene) -> Check:
    """Compare the digests of a round over ranks; error: number of fields that differ."""
    own = digests(scene.round())
    first = ranks.gather_objects(own)[0]
    wrong = [name for name in own if own[name] != first[name]]
    text = f"{wrong[0]} of rank {ranks.rank} is not that of rank 0" if wrong else ""
    return Check("digests of a round on all ranks", len(wrong), 0, text)


def agreed(ranks: RankGroup, check: Check) -> Check:
    """Combine the checks of all ranks, so that each rank knows the same."""
    return all_of(check.compared, *ranks.gather_objects(check))


def slowest(ranks: RankGroup, own: Timing) -> Timing:
    """Take the time of the slowest rank."""
    return max(ranks.gather_objects(own), key=lambda each: each.median_us)
