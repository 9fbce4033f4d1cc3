"""The group of ranks that share one model, for the fast implementation, the checks and the command line.

Every rank runs the same program on the same requests, with its slice of the weights. A collective has the same result,
bit for bit, on every rank, so ranks make the same choices without telling each other.
"""

import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from torch import distributed

from specsim.core.errors import InputError, require
from specsim.core.rank_part import RankPart
from specsim.core.state import State

LEAST_TIMEOUT = 1.0  # seconds
# Unless a user sets them otherwise: no collective uses NVLink's multicast, which not every machine has.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_RECORD = struct.Struct("<dQ?40s")  # seconds of the monotonic clock; collectives so far; whether in one; phase
PHASE_BOARD_VARIABLE = "SPECSIM_PHASE_BOARD"  # set for the processes that `specsim` starts: the file of their board
FIRST_PHASE = "start"


class RankProgress(NamedTuple):
    """The last record of one rank."""

    time: float  # of the monotonic clock
    collectives: int  # in which the rank has met the others
    waits: bool  # whether it is inside a collective
    phase: str


@dataclass(slots=True)
class PhaseBoard:
    """A rank's own record, kept in memory only where no process watches it."""

    file: BinaryIO | None = None
    phase: str = FIRST_PHASE
    collectives: int = 0

    @classmethod
    def of_process(cls) -> Self:
        """Open the board that the process which started this one watches."""
        path = os.environ.get(PHASE_BOARD_VARIABLE)
        return cls() if path is None else cls(Path(path).open("r+b", buffering=0))

    def enter(self, phase: str) -> None:
        """Write that a phase begins."""
        self.phase = phase
        self._write(False)

    def wait(self) -> None:
        """Write that the rank waits for the others."""
        self._write(True)

    def move_on(self) -> None:
        """Write that the rank has met the others."""
        self.collectives += 1
        self._write(False)

    def _write(self, waits: bool) -> None:
        if self.file is not None:
            self.file.seek(0)
            self.file.write(_RECORD.pack(time.monotonic(), self.collectives, waits, self.phase.encode()[:40]))


def create_board(path: Path) -> None:
    """Make the file of a rank that is still to start."""
    path.write_bytes(_RECORD.pack(time.monotonic(), 0, False, FIRST_PHASE.encode()))


def read_board(path: Path) -> RankProgress:
    """Read a rank's record."""
    moment, collectives, waits, phase = _RECORD.unpack(path.read_bytes()[: _RECORD.size])
    return RankProgress(moment, collectives, waits, phase.rstrip(b"\0").decode())


class RankLost(RuntimeError):
    """A collective that another rank did not reach, or that ranks called with other sizes."""


class RanksDiffer(RuntimeError):
    """A state that is not the same on every rank."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process as one of the ranks that share a model."""

    rank: int
    size: int
    board: PhaseBoard

    @classmethod
    def joined(cls, size: int) -> Self | None:
        """Find the group that this process has joined, None for a model on one rank."""
        if size == 1:
            return None
        num_ranks = distributed.get_world_size() if is_joined() else 1
        allowed = f"{num_ranks}, the ranks of this run: start it with --tensor-parallel or with torchrun"
        require(num_ranks == size, "tensor_parallel", size, allowed)
        return cls(distributed.get_rank(), size, PhaseBoard.of_process())

    @property
    def part(self) -> RankPart:
        """The slices of the model that this rank holds."""
        return RankPart(self.rank, self.size)

    def enter(self, phase: str) -> None:
        """Say which phase this rank is in, for the sentence that reports a lost rank."""
        self.board.enter(phase)

    def gather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Copy every rank's part, of one shape, to out [ranks, ...], in the order of the ranks."""
        part = part.contiguous()
        if part.shape != out.shape[1:] or part.dtype != out.dtype:
            raise ValueError(
                f"a part has shape {tuple(part.shape)}, the output {tuple(out.shape)}; allowed: [ranks, …]"
            )
        if part.numel():
            self._together(lambda: _all_gather(out.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8)))

    def gather_objects(self, value: Any) -> list[Any]:
        """Give every rank's value, in the order of the ranks; the host waits for all of them."""
        values: list[Any] = [None] * self.size
        self._together(lambda: distributed.all_gather_object(values, value))
        return values

    def require_equal(self, phase: str, state: Any) -> None:
        """Raise RanksDiffer unless a state is the same on every rank, bit for bit."""
        rank_digests = digests(state)
        if not rank_digests:
            raise TypeError(f"a {type(state).__name__} of phase {phase} has no tensors to compare")
        every = self.gather_objects(rank_digests)
        for rank, other in enumerate(every):
            if other != every[0]:
                wrong = next((name for name in rank_digests if other.get(name) != every[0].get(name)), "its fields")
                raise RanksDiffer(f"rank {rank} differs from rank 0 in {wrong} after phase {phase}")

    def _together(self, collective: Callable[[], object]) -> None:
        self.board.wait()
        try:
            collective()
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} lost the others in phase {self.board.phase}: {error}") from error
        self.board.move_on()


def digests(state: Any, name: str = "") -> dict[str, str]:
    """Digest every tensor of a state, or of a NamedTuple of states, by the names of its fields."""
    if isinstance(state, torch.Tensor):
        content = state.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()
        return {name: sha256(content + repr((state.shape, state.dtype)).encode()).hexdigest()}
    names: tuple[str, ...] = getattr(state, "_fields", ())
    if isinstance(state, State):
        names = tuple(field.name for field in fields(state))  # pyright: ignore[reportArgumentType]  # every State is a dataclass
    digest_of: dict[str, str] = {}
    for field_name in names:
        digest_of |= digests(getattr(state, field_name), f"{name}.{field_name}" if name else field_name)
    return digest_of


def is_joined() -> bool:
    """Check whether this process has joined a group of ranks."""
    return distributed.is_available() and distributed.is_initialized()


def join(size: int, timeout: float, device: str, folder: Path | None = None, rank: int | None = None) -> None:
    """Join the ranks that meet in a folder, or those of torchrun's environment.

    Tensors of the CPU are exchanged by gloo, those of GPUs by NCCL.
    """
    require(timeout >= LEAST_TIMEOUT, "rank_timeout", timeout, f"a number of seconds of at least {LEAST_TIMEOUT:g}")
    if not distributed.is_available():
        raise InputError("tensor_parallel", size, "1, as this PyTorch has no torch.distributed")
    limit = timedelta(seconds=timeout)
    meeting = {}
    if folder is not None and rank is not None:
        meeting = {"init_method": f"file://{folder / 'meeting'}", "rank": rank, "world_size": size}
    if device == "cuda":
        for name, value in WITHOUT_MULTICAST.items():
            os.environ.setdefault(name, value)
        device_of_rank = torch.device("cuda", (_local_rank() if rank is None else rank) % torch.cuda.device_count())
        torch.cuda.set_device(device_of_rank)
        # With its device, NCCL connects the ranks now, and not within a graph that is captured.
        distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=limit, device_id=device_of_rank, **meeting)
    else:
        distributed.init_process_group("gloo", timeout=limit, **meeting)


def _local_rank() -> int:
    """Read the place of a rank of torchrun on its machine."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def leave() -> None:
    """Leave the group, where this process has joined one."""
    if is_joined():
        with suppress(RuntimeError):  # another rank may have ended before
            distributed.destroy_process_group()


def _all_gather(out: torch.Tensor, part: torch.Tensor) -> None:
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(out, part)
