"""Sums over ranks: every rank reads all parts and adds them in the order of the ranks.

So a result has the same bits on every rank, and whatever gathers the parts: a library, or the GPUs' own reads of each
other's memory. Both are measured once in a process, to choose the way of small parts.
"""

from functools import cache
from itertools import takewhile
from math import nan
from statistics import median
from typing import NamedTuple, no_type_check

import torch
import triton.language as tl

from specsim.core.rank_group import RankGroup
from specsim.fast.model.rows import HiddenRows, Norm, store_sums
from specsim.fast.runtime.graph import capture
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2
from specsim.fast.runtime.peer_memory import PROGRAMS, LinkedRanks, PeerMemory, gather, meet, meet_others, next_exchange

MOST_BYTES = 4 * 2**20  # of a part
WIDTH = 4096  # of a measured row
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # 8 KiB to 4 MiB in bf16
_MOST_SPINS = 2**22  # some seconds
_SUMS = 20  # in one graph
_REPLAYS = 9


@kernel
@no_type_check
def _sum_kernel(
    out_ptrs,
    parts_ptr,
    base_ptr,
    norm_ptr,
    num_rows,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_BASE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add gathered parts of some rows in the order of the ranks, then the base."""
    await_input(PDL)
    DTYPE: tl.constexpr = out_ptrs.rows.dtype.element_ty
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)[None, :]
    mask = (row < num_rows)[:, None] & (offs < SIZE)
    total = tl.load(parts_ptr + row[:, None] * SIZE + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_H]
    for rank in tl.static_range(1, RANKS):
        part = (rank * num_rows + row[:, None]) * SIZE + offs
        total += tl.load(parts_ptr + part, mask=mask, other=0.0).to(tl.float32)
    store_sums(out_ptrs, total, base_ptr, norm_ptr, row, num_rows, SIZE, STRIDE_OUT, STRIDE_BASE, DTYPE)


@kernel
@no_type_check
def _exchanged_sum_kernel(
    out_ptrs,
    part_ptr,
    peers_ptrs,
    base_ptr,
    norm_ptr,
    num_rows,
    most_spins,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_BASE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Exchange parts of every PROGRAMS-th row, and add them as the kernel above does."""
    await_input(PDL)
    DTYPE: tl.constexpr = out_ptrs.rows.dtype.element_ty
    program = tl.program_id(0)
    offs = tl.arange(0, BLOCK_H).to(tl.int64)[None, :]
    mask = offs < SIZE
    epoch, first = next_exchange(peers_ptrs, program)
    for index in range(program, num_rows, PROGRAMS):
        entry = index * SIZE + offs
        tl.store(peers_ptrs.memory[RANK] + first + entry, tl.load(part_ptr + entry, mask=mask, other=0.0), mask=mask)
    if program < num_rows:
        meet_others(peers_ptrs, program, epoch, most_spins, RANK, RANKS)
    for index in range(program, num_rows, PROGRAMS):
        row = index + tl.arange(0, 1).to(tl.int64)
        entry = first + row[:, None] * SIZE + offs
        total = tl.load(peers_ptrs.memory[0] + entry, mask=mask, other=0.0).to(tl.float32)  # [1, BLOCK_H]
        for rank in tl.static_range(1, RANKS):
            total += tl.load(peers_ptrs.memory[rank] + entry, mask=mask, other=0.0).to(tl.float32)
        store_sums(out_ptrs, total, base_ptr, norm_ptr, row, num_rows, SIZE, STRIDE_OUT, STRIDE_BASE, DTYPE)
    tl.store(peers_ptrs.epochs + program, epoch)


def sum_residual(
    ranks: RankGroup,
    base: torch.Tensor | None,
    part_RH: torch.Tensor,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
) -> HiddenRows:
    """Compute base + Σ parts over ranks, [R, H], and prepare the next norm.

    base and out may be slices of wider tensors.
    """
    part_RH = part_RH.contiguous()
    out = torch.empty_like(part_RH) if out is None else out
    onto = HiddenRows.to_write(out, norm, 1)
    if isinstance(ranks, LinkedRanks) and ranks.links(part_RH):
        exchanged_sum(ranks.peers, base, part_RH, onto)
        return onto
    parts = gather(ranks, part_RH)
    num_rows, size = part_RH.shape
    block = block_of(num_rows, 1, size)
    _sum_kernel[(ceil_div(num_rows, block),)](
        out_ptrs=onto.outputs,
        parts_ptr=parts,
        base_ptr=base,
        norm_ptr=onto.next_weight,
        num_rows=num_rows,
        RANKS=ranks.size,
        SIZE=size,
        STRIDE_OUT=out.stride(0),
        STRIDE_BASE=0 if base is None else base.stride(0),
        BLOCK_R=block,
        BLOCK_H=next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )
    return onto


def exchanged_sum(peers: PeerMemory, base: torch.Tensor | None, part_RH: torch.Tensor, onto: HiddenRows) -> None:
    """Compute the same sum through the memory of the other ranks, in one kernel."""
    num_rows, size = part_RH.shape
    _exchanged_sum_kernel[(PROGRAMS,)](
        out_ptrs=onto.outputs,
        part_ptr=part_RH,
        peers_ptrs=peers.arguments(part_RH.dtype),
        base_ptr=base,
        norm_ptr=onto.next_weight,
        num_rows=num_rows,
        most_spins=peers.most_spins,
        RANK=peers.rank,
        RANKS=len(peers.memory),
        SIZE=size,
        STRIDE_OUT=onto.values.stride(0),
        STRIDE_BASE=0 if base is None else base.stride(0),
        PROGRAMS=PROGRAMS,
        BLOCK_H=next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )


class LinkTime(NamedTuple):
    """Microseconds of a sum over ranks, on the slowest one."""

    num_bytes: int  # of each part
    library: float
    peers: float
    is_equal: bool  # bit for bit


class Links(NamedTuple):
    """Ranks that see each other's memory, or the reason why they do not."""

    peers: PeerMemory | str
    times: tuple[LinkTime, ...] = ()

    @property
    def reason(self) -> str:
        """Obstacle to the use of that memory; empty where there is none."""
        if isinstance(self.peers, str):
            return self.peers
        return "" if all(time.is_equal for time in self.times) else "sums through the memory of other GPUs differ"

    @property
    def most_bytes(self) -> int:
        """Size up to which the memory of the others is the faster way, 0 for none."""
        if self.reason:
            return 0
        faster = takewhile(lambda time: time.peers <= time.library, self.times)
        return max((time.num_bytes for time in faster), default=0)


def linked(ranks: RankGroup | None, device: torch.device) -> RankGroup | None:
    """Let ranks exchange parts through each other's memory, up to the size where a library is faster."""
    if ranks is None or device.type != "cuda":
        return ranks
    measured_links = links(ranks.size)
    if isinstance(measured_links.peers, str) or not measured_links.most_bytes:
        return ranks
    return LinkedRanks(ranks.rank, ranks.size, ranks.board, measured_links.peers, measured_links.most_bytes)


@cache
def links(size: int) -> Links:
    """Connect this process with the other ranks of its machine, and measure sums of both kinds."""
    ranks = RankGroup.joined(size)
    if ranks is None:
        return Links("there is one rank")
    device = torch.device("cuda")
    peers = meet(ranks, device, MOST_BYTES)
    if isinstance(peers, str):
        return Links(peers)
    through = LinkedRanks(ranks.rank, ranks.size, ranks.board, peers, MOST_BYTES)
    with torch.inference_mode():
        # Compile without waiting for the others, which may take seconds longer.
        sum_residual(through.within(0), None, torch.zeros(1, WIDTH, dtype=torch.bfloat16, device=device))
        torch.cuda.synchronize()
        # A rank that waits in vain has another sum then, and none uses that memory.
        return Links(peers, measured(ranks, through.within(_MOST_SPINS), device))


def measured(library: RankGroup, peers: RankGroup, device: torch.device) -> tuple[LinkTime, ...]:
    """Measure sums of both ways by size, up to the first one that differs; every rank gets the same times."""
    times = []
    for num_rows in ROWS:
        generator = torch.Generator(device).manual_seed(library.rank)
        part = torch.randn(num_rows, WIDTH, generator=generator, device=device).to(torch.bfloat16)
        library.gather_objects(None)
        sums = [sum_residual(ranks, None, part).values for ranks in (library, peers)]
        if not all(library.gather_objects(torch.equal(*sums))):
            times.append(LinkTime(part.nbytes, nan, nan, False))
            break
        local_times = [_time(ranks, part) for ranks in (library, peers)]
        by_library, by_peers = (max(pair) for pair in zip(*library.gather_objects(local_times), strict=True))
        times.append(LinkTime(part.nbytes, by_library, by_peers, True))
    return tuple(times)


def _time(ranks: RankGroup, part: torch.Tensor) -> float:
    """Measure the microseconds of a sum in a graph of many."""

    def work() -> None:
        for _ in range(_SUMS):
            sum_residual(ranks, None, part)

    graph = capture(work, part.device)
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / _SUMS)
    return median(times)
