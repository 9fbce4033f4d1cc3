"""Rounds on one GPU and on several that share the model, after equality checks, and the simulator's expectation.

Every rank runs this program. Ranks agree on each check and on each time, so that all go the same way.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from specsim.bench.clock import launched
from specsim.bench.dense import head_of
from specsim.bench.round_checks import check_round
from specsim.bench.rounds import CONSECUTIVE, RANDOM, SEQ_LEN, consecutive
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing, all_of, equal
from specsim.bench.scene import DRAFTER, SPECULATIVE, Scene, prefilled, stacked, tree_of
from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.kinds import DEFAULT
from specsim.core.pair import Pair
from specsim.core.rank_group import RankGroup, digests
from specsim.core.target import ModelConfig
from specsim.models.shapes import random_pair, random_prompts
from specsim.serving.generation import load_engine
from specsim.simulator import CostModel, drafter, model
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import Hardware, reported_hardware
from specsim.simulator.model import Model

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


class Expected(NamedTuple):
    """A round on several GPUs, without the host."""

    ratio: float  # of its time and of that on one GPU
    exchanges: float  # seconds between GPUs
    share: float  # of them


def joined(size: int) -> RankGroup:
    """Find the ranks that run this suite together."""
    ranks = RankGroup.joined(size)
    if ranks is None:
        raise InputError("tensor_parallel", size, "at least 2 for the suite tensor-parallel")
    return ranks


def exchange_rows(size: int, quick: bool) -> Iterator[BenchRow]:
    """Time sums over ranks by size: by NCCL, and through the memory of the other GPUs."""
    from specsim.fast.model.rank_sums import MOST_BYTES as LARGEST
    from specsim.fast.model.rank_sums import links
    from specsim.fast.runtime.peer_memory import LinkedRanks

    ranks = joined(size)
    rank_links = links(ranks.size)
    groups = {LIBRARY: ranks}
    if isinstance(rank_links.peers, str) or rank_links.reason:
        note = f"rounds exchange all parts by {LIBRARY}: {rank_links.reason}"
    else:
        groups = {OURS: LinkedRanks(ranks.rank, ranks.size, ranks.board, rank_links.peers, LARGEST), **groups}
        note = f"rounds exchange parts of up to {rank_links.most_bytes:,} bytes through the memory of the other GPUs"
    for rows in PART_ROWS[:: 2 if quick else 1]:
        yield exchange_row(ranks, groups, rows, note)


@torch.inference_mode()
def exchange_row(ranks: RankGroup, groups: dict[str, RankGroup], rows: int, note: str) -> BenchRow:
    """Compare the bits of each group's sum with a sum in the order of the ranks, and time it."""
    from specsim.fast.model.rank_sums import sum_residual

    parts = [_part(rank, rows) for rank in range(ranks.size)]
    total = parts[0].float()
    for other in parts[1:]:
        total += other.float()
    expected_sum = {"sum": total.to(parts[0].dtype)}
    part = parts[ranks.rank]
    checks = {}
    timings = {}
    for name, group in groups.items():
        run = partial(sum_residual, group, None, part)
        check = equal("the sum in the order of the ranks, bit for bit", {"sum": run().values}, expected_sum)
        checks[name] = agreed(ranks, check)
        if checks[name].passed:
            timings[name] = slowest(ranks, launched(lambda _, run=run: run(), 1, 20))
    theirs = expected_exchange(ranks.size, part.nbytes)
    notes = (note, *([] if theirs is None else [f"the simulator's term: {1e6 * theirs:.1f} us"]))
    return BenchRow("sum over ranks", {"GPUs": ranks.size, "bytes": part.nbytes}, checks, timings, notes=notes)


def _part(rank: int, rows: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rank)
    return torch.randn(rows, WIDTH, generator=generator, device="cuda").to(torch.bfloat16)


def round_rows(shape: str, size: int, quick: bool) -> Iterator[BenchRow]:
    """Time speculative rounds of two shapes, on one GPU and on all."""
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
) -> BenchRow:
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
    setting = {"shape": name, "GPUs": ranks.size, "requests": requests, "tree": tree_of(SPECULATIVE), "L": SEQ_LEN}
    targets = ()
    notes = [RANDOM]
    if len(timings) == 2:
        ratio = timings[OURS].median_us / timings[ONE].median_us
        limit = MOST_RATIO.get(requests)
        is_target = ranks.size == 2 and limit is not None
        targets = (PerformanceTarget("time on two GPUs / time on one", ratio, limit or 0.0),) if is_target else ()
        vocab_size = head_of(pair).config.draft_vocab_size
        of_simulator = expected(pair.target.config, vocab_size, ranks.size, requests, SPECULATIVE, SEQ_LEN)
        notes += [] if of_simulator is None else [compared(of_simulator, ratio)]
    return BenchRow(f"{DRAFTER} round on several GPUs", setting, checks, timings, targets=targets, notes=tuple(notes))


def compared(of_simulator: Expected, ratio: float) -> str:
    """Compare a measured ratio of times with the simulator's."""
    return (
        f"the simulator: {of_simulator.ratio:.3f} of the time on one GPU ({ratio / of_simulator.ratio - 1:+.1%} here), "
        f"{1e6 * of_simulator.exchanges:,.0f} us of exchanges, {of_simulator.share:.1%} of its round"
    )


def share_rows(shape: str, size: int, quick: bool) -> Iterator[BenchRow]:
    """Find the share of exchanges in a round's kernels, by a profile.

    This group is the last: a profiler slows all later launches.
    """
    ranks = joined(size)
    for name in (shape,) if quick else (shape, SLICE):
        pair = stacked(random_pair(name, "cuda", torch.bfloat16))
        for requests in REQUESTS[: 1 if quick else None]:
            scene = scene_on(pair, requests, ranks.size)
            check = agreed(ranks, same_on_all(ranks, scene))
            seconds = _kernel_us(scene, ranks) if check.passed else {}
            yield share_row(name, requests, ranks, check, ranks.gather_objects(seconds))
            del scene
            torch.cuda.empty_cache()
        del pair
        torch.cuda.empty_cache()


def share_row(shape: str, requests: int, ranks: RankGroup, check: Check, by_rank: list[dict[str, float]]) -> BenchRow:
    """Name the exchanges' share of the kernel times of every rank; it includes the wait for the other ranks."""
    notes = []
    for rank, kernels in enumerate(by_rank):
        spent = sum(us for name, us in kernels.items() if any(part in name.lower() for part in EXCHANGES))
        total = sum(kernels.values())
        if total:
            notes.append(
                f"rank {rank}: exchanges {spent:,.0f} of {total:,.0f} us of kernels a round, {spent / total:.1%}"
            )
    setting = {"shape": shape, "GPUs": ranks.size, "requests": requests, "tree": tree_of(SPECULATIVE), "L": SEQ_LEN}
    return BenchRow("exchanges of a round", setting, {OURS: check}, notes=tuple(notes))


def _kernel_us(scene: Scene, ranks: RankGroup) -> dict[str, float]:
    """Profile rounds: microseconds of every kernel in one round, by name.

    The first profile of a process takes long to start, and its rank would be waited for: it is not counted. Ranks meet
    before the rounds that are.
    """
    from torch.profiler import ProfilerActivity, profile

    def profiled(rounds: int) -> Any:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            ranks.gather_objects(None)
            scene.rounds(rounds)
            torch.cuda.synchronize()
        return profiler.key_averages()

    profiled(1)
    events = profiled(CONSECUTIVE)
    return {event.key: event.self_device_time_total / CONSECUTIVE for event in events if event.self_device_time_total}


def scene_on(pair: Pair, requests: int, size: int, device: str = "cuda") -> Scene:
    """Prefill requests of SEQ_LEN random tokens on `size` ranks; a round is one graph on each."""
    options = EngineOptions("fast", torch.bfloat16, device, "round", requests, tensor_parallel=size)
    engine = load_engine(pair, SPECULATIVE, options)
    prompts = random_prompts(max(REQUESTS), SEQ_LEN, pair.target.config.vocab_size)[:requests]
    return prefilled(pair, engine, prompts)


def same_on_all(ranks: RankGroup, scene: Scene) -> Check:
    """Compare the digests of a round over ranks; error: number of fields that differ."""
    rank_digests = digests(scene.round())
    first = ranks.gather_objects(rank_digests)[0]
    wrong = [name for name in rank_digests if rank_digests[name] != first[name]]
    text = f"{wrong[0]} of rank {ranks.rank} is not that of rank 0" if wrong else ""
    return Check("digests of a round on all ranks", len(wrong), 0, text)


def agreed(ranks: RankGroup, check: Check) -> Check:
    """Combine the checks of all ranks, so that each rank knows the same."""
    return all_of(check.compared, *ranks.gather_objects(check))


def slowest(ranks: RankGroup, timing: Timing) -> Timing:
    """Take the time of the slowest rank."""
    return max(ranks.gather_objects(timing), key=lambda rank_timing: rank_timing.median_us)


def expected(
    config: ModelConfig, draft_vocab_size: int, size: int, requests: int, tree: SpecConfig, seq_len: int
) -> Expected | None:
    """Compute the expectation of speculative rounds with the default parameters; None for a GPU without figures."""
    gpu = this_gpu()
    if gpu is None:
        return None
    target = shape_of(config)
    head = drafter(DEFAULT, target, draft_vocab_size)
    alone, shared = (CostModel(gpu, target, head, tensor_parallel=count) for count in (1, size))
    contexts = np.full(requests, seq_len)
    phases = [cost.phases(contexts, tree) for cost in (alone, shared)]
    seconds = [phase.draft + phase.verify + phase.extend for phase in phases]
    exchanges = shared.exchanges(requests, tree)
    return Expected(seconds[1] / seconds[0], exchanges, exchanges / seconds[1])


def expected_exchange(size: int, nbytes: int) -> float | None:
    """Compute the seconds of one sum over GPUs; None for a GPU without figures."""
    gpu = this_gpu()
    if gpu is None:
        return None
    from specsim.simulator.forward import Forward

    return Forward(gpu, model("llama-3-8b"), Efficiency(), size).exchange(nbytes)


def this_gpu() -> Hardware | None:
    """Find this machine's GPU in the simulator's table."""
    return reported_hardware(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def shape_of(config: ModelConfig) -> Model:
    """Describe a dense model of heads to the simulator."""
    fields: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    return model(fields)
