"""Exchanges of small tensors between the GPUs of one machine, which read each other's memory in one kernel.

Program p of every rank copies its share to memory that all ranks see (PyTorch's symmetric memory), raises a flag in the
memory of the others, waits for program p of each of them, and reads their shares. Exchanges alternate between two
halves. A rank that writes to a half again has met all others in the exchange between, before which they had ended
their reads.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.rank_group import RankGroup
from specsim.fast.runtime.launch import await_input, kernel, recorder

PROGRAMS = 64  # of every exchange, fewer than a data-center GPU has multiprocessors
_WORDS = 1024  # of one program at a time
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Peers(NamedTuple):
    """Memory of all ranks as kernel arguments."""

    memory: tuple[torch.Tensor, ...]  # by rank: two halves
    flags: tuple[torch.Tensor, ...]  # i32 [PROGRAMS · ranks] by rank: the last exchange that each rank's programs began
    epochs: torch.Tensor  # i32 [PROGRAMS], of this rank: exchanges so far
    half: int  # entries of a half


@triton.jit
@no_type_check
def next_exchange(peers, program):
    """Number the next exchange of a program, and find the first entry of its half."""
    epoch = tl.load(peers.epochs + program) + 1
    return epoch, (epoch & 1).to(tl.int64) * peers.half


@triton.jit
@no_type_check
def meet_others(peers, program, epoch, most_spins, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell every other rank that this program's share is there, and wait for theirs; most_spins: -1 for ever."""
    tl.debug_barrier()  # the stores of all threads come before the flags
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.atomic_xchg(peers.flags[rank] + program * RANKS + RANK, epoch, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag_ptr = peers.flags[RANK] + program * RANKS + rank
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            spins = 0
            while (seen - epoch < 0) & (spins != most_spins):
                seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
                spins += 1
    tl.debug_barrier()


@kernel
@no_type_check
def _exchange_kernel(
    out_ptr,
    part_ptr,
    peers_ptrs,
    count,
    most_spins,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy every rank's part to the output, in the order of the ranks."""
    await_input(PDL)
    program = tl.program_id(0)
    epoch, first = next_exchange(peers_ptrs, program)
    num_blocks = tl.cdiv(count, BLOCK)
    for block in range(program, num_blocks, PROGRAMS):
        offs = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        part = tl.load(part_ptr + offs, mask=offs < count, other=0)
        tl.store(peers_ptrs.memory[RANK] + first + offs, part, mask=offs < count)
    if program < num_blocks:
        meet_others(peers_ptrs, program, epoch, most_spins, RANK, RANKS)
    for block in range(program, num_blocks, PROGRAMS):
        offs = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        for rank in tl.static_range(RANKS):
            part = tl.load(peers_ptrs.memory[rank] + first + offs, mask=offs < count, other=0)
            tl.store(out_ptr + rank * count.to(tl.int64) + offs, part, mask=offs < count)
    tl.store(peers_ptrs.epochs + program, epoch)


@dataclass(frozen=True, slots=True, eq=False)
class PeerMemory:
    """Memory of all ranks that each of them sees."""

    memory: tuple[torch.Tensor, ...]  # u8 [2 · half + flags], by rank; zeros at first
    rank: int
    epochs: torch.Tensor  # i32 [PROGRAMS], zeros at first
    half: int  # bytes of the largest part
    most_spins: int = -1  # for the flags of the others; -1: for ever

    @staticmethod
    def num_bytes(half: int, num_ranks: int) -> int:
        """Count the bytes of one rank's memory."""
        return 2 * half + 4 * PROGRAMS * num_ranks

    def arguments(self, dtype: torch.dtype) -> Peers:
        """Make the arguments of a kernel that exchanges entries of this type."""
        halves = tuple(memory[: 2 * self.half].view(dtype) for memory in self.memory)
        flags = tuple(memory[2 * self.half :].view(torch.int32) for memory in self.memory)
        return Peers(halves, flags, self.epochs, self.half // dtype.itemsize)

    def gather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Copy every rank's part, of one shape, to out [ranks, ...], in the order of the ranks."""
        integer = _integer_of(part)
        words = part.view(-1).view(integer)
        _exchange_kernel[(PROGRAMS,)](
            out_ptr=out.view(-1).view(integer),
            part_ptr=words,
            peers_ptrs=self.arguments(integer),
            count=words.numel(),
            most_spins=self.most_spins,
            RANK=self.rank,
            RANKS=len(self.memory),
            PROGRAMS=PROGRAMS,
            BLOCK=_WORDS,
        )


@dataclass(frozen=True, slots=True)
class LinkedRanks(RankGroup):
    """Ranks on GPUs of one machine that exchange small parts through each other's memory."""

    peers: PeerMemory
    most_bytes: int  # of a part that goes through it; larger ones go through the library

    def links(self, part: torch.Tensor) -> bool:
        """Check whether a part goes through the memory of the others."""
        return part.is_cuda and 0 < part.nbytes <= self.most_bytes

    def within(self, most_spins: int) -> "LinkedRanks":
        """Let ranks look at most this often at the others' flags; after that a result may be wrong."""
        return replace(self, peers=replace(self.peers, most_spins=most_spins))


def _integer_of(part: torch.Tensor) -> torch.dtype:
    """Choose the widest integer type that a tensor can be copied in."""
    first = int(part.storage_offset()) * part.itemsize
    return next(dtype for dtype in _INTEGERS if part.nbytes % dtype.itemsize == first % dtype.itemsize == 0)


def meet(ranks: RankGroup, device: torch.device, most_bytes: int) -> PeerMemory | str:
    """Make memory for parts of up to this many bytes that all ranks see, or say why there is none.

    Every rank gets the same answer.
    """
    reason = _first(ranks, _none_for(ranks, device))
    if reason:
        return reason
    local_memory: Any = None
    size = PeerMemory.num_bytes(most_bytes, ranks.size)
    try:
        from torch.distributed import _symmetric_memory as symmetric

        local_memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        local_memory.zero_()
        torch.cuda.synchronize()
    except (ImportError, RuntimeError) as error:
        reason = f"this PyTorch allocates none: {_first_line(error)}"
    if reason := _first(ranks, reason):
        return reason
    try:
        from torch import distributed
        from torch.distributed import _symmetric_memory as symmetric

        group: Any = distributed.group.WORLD
        shared = symmetric.rendezvous(local_memory, group)
        memory = [shared.get_buffer(rank, (size,), torch.uint8) for rank in range(ranks.size)]
        memory[ranks.rank] = local_memory  # which is freed where nobody refers to it
        epochs = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        peers = PeerMemory(tuple(memory), ranks.rank, epochs, most_bytes)
    except RuntimeError as error:
        peers = f"ranks do not see each other's memory: {_first_line(error)}"
    return _first(ranks, peers if isinstance(peers, str) else "") or peers


def _none_for(ranks: RankGroup, device: torch.device) -> str:
    """Say why this rank can read no memory of the others; empty where it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "ranks are on no NVIDIA GPUs"
    count = torch.cuda.device_count()
    if count < ranks.size:
        return f"this process sees {count} GPUs, and there are {ranks.size} ranks"
    gpu = torch.cuda.current_device()
    blind = [other for other in range(ranks.size) if other != gpu and not torch.cuda.can_device_access_peer(gpu, other)]
    return f"GPU {gpu} cannot read the memory of GPU {blind[0]}" if blind else ""


def _first(ranks: RankGroup, reason: str) -> str:
    """Give the reason of the first rank that has one to all."""
    return next(filter(None, ranks.gather_objects(reason)), "")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def gather(ranks: RankGroup, part: torch.Tensor) -> torch.Tensor:
    """Gather parts of one shape, [ranks, ...], also in a graph that is recorded."""
    part = part.contiguous()
    out = part.new_empty(ranks.size, *part.shape)
    record = recorder.get()
    if isinstance(ranks, LinkedRanks) and ranks.links(part):
        ranks.peers.gather(part, out)
    elif record is None:
        ranks.gather(part, out)
    else:
        record("gather over ranks", lambda: ranks.gather(part, out))
    return out


def without_padding(ranks: RankGroup, part_RC: torch.Tensor, size: int) -> torch.Tensor:
    """Set the entries of a slice beyond the row's size to -inf, in place."""
    num_tokens = len(ranks.part.tokens(size))
    if num_tokens < part_RC.shape[1]:
        part_RC[:, num_tokens:].fill_(float("-inf"))
    return part_RC


def join_slices(ranks: RankGroup, part_RC: torch.Tensor, size: int) -> torch.Tensor:
    """Join slices of rows in the order of the ranks, [R, size].

    The last slices may be longer than needed.
    """
    parts = gather(ranks, part_RC)
    num_rows, chunk = part_RC.shape
    joined = part_RC.new_empty(num_rows, size)
    for rank in range(ranks.size):
        start = rank * chunk
        width = min(chunk, size - start)
        if width > 0:
            joined[:, start : start + width].copy_(parts[rank, :, :width])
    return joined
