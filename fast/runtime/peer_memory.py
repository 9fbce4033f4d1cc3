"""Exchanges of small tensors between the GPUs of one machine, which read each other's memory.

Every rank copies its part to memory that all of them see, and reads the others' parts after a barrier: PyTorch's
symmetric memory, without NVLink multicast. Exchanges alternate between two halves of that memory. A rank that writes to
a half again has passed a later barrier, before which every other rank had ended its reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

import torch
import triton.language as tl

from specsim.core.rank_group import RankGroup
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Parts(NamedTuple):
    """Parts of all ranks as kernel arguments."""

    of_rank: tuple[torch.Tensor, ...]  # in the order of the ranks, each with all of its part from its first entry on
    epochs: torch.Tensor | None = None  # i32 [2], of PeerMemory, whose halves the parts are in; None: there are none
    half: int = 0  # entries of a half


@kernel
@no_type_check
def _put_kernel(
    memory_ptr,
    part_ptr,
    epochs_ptr,
    count,
    half,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy a part to the half of the next exchange, and begin that exchange."""
    await_input(PDL)
    epoch = tl.load(epochs_ptr + 1)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.load(part_ptr + offs, mask=offs < count, other=0)
    tl.store(memory_ptr + (epoch & 1).to(tl.int64) * half + offs, part, mask=offs < count)
    if tl.program_id(0) == 0:
        tl.store(epochs_ptr, epoch)


@kernel
@no_type_check
def _take_kernel(
    out_ptr,
    parts_ptrs,
    count,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy all parts of this exchange behind each other, and end it."""
    await_input(PDL)
    epoch = tl.load(parts_ptrs.epochs)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = (epoch & 1).to(tl.int64) * parts_ptrs.half + offs
    for rank in tl.static_range(RANKS):
        part = tl.load(parts_ptrs.of_rank[rank] + source, mask=offs < count, other=0)
        tl.store(out_ptr + rank * count.to(tl.int64) + offs, part, mask=offs < count)
    if tl.program_id(0) == 0:
        tl.store(parts_ptrs.epochs + 1, epoch + 1)


@dataclass(frozen=True, slots=True, eq=False)
class PeerMemory:
    """Memory of all ranks that each of them sees."""

    memory: tuple[torch.Tensor, ...]  # u8 [2 · half], by rank
    rank: int
    barrier: Callable[[], None]  # after which what every rank has written before it is seen by all
    epochs: torch.Tensor  # i32 [2]: number of this exchange, and of the next one

    @property
    def half(self) -> int:
        """Bytes of the largest part."""
        return self.memory[0].numel() // 2

    def put(self, part: torch.Tensor) -> None:
        """Begin an exchange: copy this rank's contiguous part, and wait on the device until all have theirs."""
        integer = _integer_of(part)
        words = part.view(-1).view(integer)
        block = block_of(words.numel(), 1024)
        _put_kernel[(ceil_div(words.numel(), block),)](
            memory_ptr=self.memory[self.rank].view(integer),
            part_ptr=words,
            epochs_ptr=self.epochs,
            count=words.numel(),
            half=self.half // words.itemsize,
            BLOCK=block,
        )
        self.barrier()

    def parts(self, dtype: torch.dtype) -> Parts:
        """List all parts of this exchange for a kernel that reads them, and then adds one to the second epoch."""
        views = tuple(each.view(dtype) for each in self.memory)
        return Parts(views, self.epochs, self.half // views[0].itemsize)

    def gather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Copy every rank's part, of one shape, to out [ranks, ...], in the order of the ranks."""
        self.put(part)
        integer = _integer_of(part)
        words = out.view(-1).view(integer)
        count = words.numel() // len(self.memory)
        block = block_of(count, 1024)
        _take_kernel[(ceil_div(count, block),)](
            out_ptr=words,
            parts_ptrs=self.parts(integer),
            count=count,
            RANKS=len(self.memory),
            BLOCK=block,
        )


@dataclass(frozen=True, slots=True)
class LinkedRanks(RankGroup):
    """Ranks on GPUs of one machine that exchange small parts through each other's memory."""

    peers: PeerMemory
    most_bytes: int  # of a part that goes through it; larger ones go through the library

    def links(self, part: torch.Tensor) -> bool:
        """Check whether a part goes through the memory of the others."""
        return part.is_cuda and 0 < part.nbytes <= self.most_bytes


def _integer_of(part: torch.Tensor) -> torch.dtype:
    """Choose the widest integer type that a tensor can be copied in."""
    first = int(part.storage_offset()) * part.itemsize
    return next(each for each in _INTEGERS if part.nbytes % each.itemsize == first % each.itemsize == 0)


def meet(ranks: RankGroup, device: torch.device, most_bytes: int) -> PeerMemory | str:
    """Make memory for parts of up to this many bytes that all ranks see, or say why there is none.

    Every rank gets the same answer.
    """
    reason = _first(ranks, _none_for(ranks, device))
    if reason:
        return reason
    made: Any = None
    try:
        from torch.distributed import _symmetric_memory as symmetric

        made = symmetric.empty(2 * most_bytes, dtype=torch.uint8, device=device)
    except (ImportError, RuntimeError) as error:
        reason = f"this PyTorch allocates none: {_first_line(error)}"
    if reason := _first(ranks, reason):
        return reason
    try:
        from torch import distributed
        from torch.distributed import _symmetric_memory as symmetric

        group: Any = distributed.group.WORLD
        shared = symmetric.rendezvous(made, group)
        memory = [shared.get_buffer(rank, (2 * most_bytes,), torch.uint8) for rank in range(ranks.size)]
        memory[ranks.rank] = made  # which is freed where nobody refers to it
        epochs = torch.zeros(2, dtype=torch.int32, device=device)
        peers = PeerMemory(tuple(memory), ranks.rank, lambda: shared.barrier(channel=0), epochs)
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
    own = torch.cuda.current_device()
    blind = [other for other in range(ranks.size) if other != own and not torch.cuda.can_device_access_peer(own, other)]
    return f"GPU {own} cannot read the memory of GPU {blind[0]}" if blind else ""


def _first(ranks: RankGroup, reason: str) -> str:
    """Give the reason of the first rank that has one to all."""
    return next(filter(None, ranks.gather_objects(reason)), "")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
