"""The phase that a rank is in, in a file that the process that started it reads."""

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

_RECORD = struct.Struct("<dQ?40s")  # seconds of the monotonic clock; collectives so far; whether in one; phase
VARIABLE = "SPECSIM_PHASE_BOARD"  # set for the processes that `specsim` starts: the file of their board
FIRST_PHASE = "start"


class Progress(NamedTuple):
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
        path = os.environ.get(VARIABLE)
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


def create(path: Path) -> None:
    """Make the file of a rank that is still to start."""
    path.write_bytes(_RECORD.pack(time.monotonic(), 0, False, FIRST_PHASE.encode()))


def read(path: Path) -> Progress:
    """Read a rank's record."""
    moment, collectives, waits, phase = _RECORD.unpack(path.read_bytes()[: _RECORD.size])
    return Progress(moment, collectives, waits, phase.rstrip(b"\0").decode())
