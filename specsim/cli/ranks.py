"""Commands that run on several ranks, one process each: options, start, watch, and outputs of rank 0 alone.

A rank that ends or hangs ends them all.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import click

from specsim.cli.option_fields import option
from specsim.core.children import PROCESS_LOST, child_words, python_path, start_child, temporary_folder
from specsim.core.errors import InputError, require_choice, tell

if TYPE_CHECKING:
    from specsim.core.rank_group import RankProgress


_OUTPUTS = ("json", "html", "trace")
MOST_RANKS = 64
_Options = TypeVar("_Options", bound="RankTimeoutOptions")


@dataclass(frozen=True, kw_only=True)
class RankTimeoutOptions:
    """The wait of ranks for each other."""

    # Seconds after which ranks that wait for another are ended.
    rank_timeout: Annotated[float, option("Ranks", at_least=1, at_most=86400)] = 300.0


@dataclass(frozen=True, kw_only=True)
class RankOptions(RankTimeoutOptions):
    """Ranks that share the model, and the drafter's part of each."""

    # Ranks that share the model, one process each; needs --impl fast.
    tensor_parallel: Annotated[int, option("Ranks", at_least=1, at_most=MOST_RANKS)] = 1
    # Drafter's weights: a slice on each rank, or all on each.
    draft_parallel: Annotated[Literal["sharded", "replicated"], option("Ranks")] = "sharded"


def in_ranks(command: Callable[[_Options], None]) -> Callable[[_Options], None]:
    """Run a command in as many processes as --tensor-parallel says; torchrun's own take part as they are."""

    @wraps(command)
    def started(options: Any) -> None:
        if options.tensor_parallel == 1:
            command(options)
            return
        require_choice("impl", options.impl, ("fast",))
        start_ranks(command, options, options.tensor_parallel, options.device)

    return started


def start_ranks(command: Callable[[_Options], None], options: _Options, size: int, device: str | None) -> None:
    """Run a command in processes of its own for each rank, or as the rank that this process is."""
    timeout = options.rank_timeout
    rank_device = _device(device, size)
    from specsim.core.rank_group import is_joined, join

    if not is_joined() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        join(size, timeout, rank_device)
    if is_joined():
        _run_own(command, options, size)
        return
    status = run_ranks(lambda folder, rank: _words(folder, rank, size, timeout, rank_device), size, timeout)
    raise click.exceptions.Exit(status)


def _device(device: str | None, size: int) -> str:
    """Choose the ranks' device, as engines do, and see that there is a GPU for each rank."""
    import torch

    from specsim.core.engine_options import check_device

    chosen = check_device(device)
    if chosen == "cuda" and torch.cuda.device_count() < size:
        raise InputError("tensor_parallel", size, f"at most {torch.cuda.device_count()}, the GPUs of this machine")
    return chosen


def _words(folder: Path, rank: int, size: int, timeout: float, device: str) -> list[str]:
    rank_arguments = [str(folder), str(rank), str(size), str(timeout), device]
    return child_words(folder, "specsim.cli.rank_process", *rank_arguments, *sys.argv[1:])


def _run_own(command: Callable[[_Options], None], options: _Options, size: int) -> None:
    """Run this rank's command; ranks other than 0 print nothing and write their files where nobody reads them."""
    from specsim.core.rank_group import RankGroup

    group = RankGroup.joined(size)
    if group is None or group.rank == 0:
        command(options)
        return
    with temporary_folder() as folder, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        files = {name: getattr(options, name, None) for name in _OUTPUTS}
        aside = {name: _aside(file, folder) for name, file in files.items() if file is not None}
        command(replace(options, **aside))


def _aside(file: Path, folder: Path) -> Path:
    """Copy an output, from which a run may resume, to a folder, and name its place there."""
    other = folder / file.name
    if file.is_file():
        shutil.copy(file, other)
    return other


LOST = 71  # exit status of a rank that lost the others
BROKEN = 70  # exit status of a rank with an error of its own
GRACE = 5.0  # seconds in which the other ranks may end by themselves
STARTUP = 300.0  # seconds in which every rank has to import, load and reach its first collective
_PAUSE = 0.05

Words = Callable[[Path, int], Sequence[str]]


def run_ranks(words: Words, size: int, timeout: float) -> int:
    """Run one process for each rank to its end, and return the exit status of rank 0, or another's failure.

    words: the command line of a rank, by the folder in which ranks meet and its number. The output of rank 0 goes to
    this process's, that of the others nowhere. Where a rank ends early, or none moves for `timeout` seconds, all are
    ended, one sentence names the rank and its phase, and the status is PROCESS_LOST.
    """
    with temporary_folder() as folder:
        processes = [_start(words(folder, rank), folder, rank) for rank in range(size)]
        try:
            sentence = _watch(processes, folder, timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
        if sentence is None:
            return _status([process.returncode for process in processes], folder)
        tell(sentence)
        return PROCESS_LOST


def _start(words: Sequence[str], folder: Path, rank: int) -> subprocess.Popen[bytes]:
    from specsim.core.rank_group import PHASE_BOARD_VARIABLE, create_board

    board = folder / f"phase-{rank}"
    create_board(board)
    # Ranks of one machine meet over the loopback device, whatever the machine's name resolves to.
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, PHASE_BOARD_VARIABLE: str(board), **python_path()}
    if rank == 0:
        return start_child(words, env=environment)
    with (folder / f"errors-{rank}").open("wb") as errors:
        return start_child(words, env=environment, stdout=subprocess.DEVNULL, stderr=errors)


def _watch(processes: Sequence[subprocess.Popen[bytes]], folder: Path, timeout: float) -> str | None:
    """Wait for all ranks to end; the sentence about the rank that kept them from it, None if none did.

    Where rank 0 has ended by itself, with whatever status, its result stands. Another rank that has ended by itself may
    be done earlier, as rank 0 alone compares with the oracle and prints.
    """
    failed_at: float | None = None
    while True:
        statuses = [process.poll() for process in processes]
        moment = time.monotonic()
        if None not in statuses or (failed_at is not None and moment > failed_at + GRACE):
            return None if _is_own(statuses[0]) else _blame(statuses, _boards(folder, len(processes)), folder)
        is_over = statuses[0] is not None or any(status is not None and not _is_own(status) for status in statuses)
        if failed_at is None and is_over:
            failed_at = moment
        boards = _boards(folder, len(processes))
        limit = max(timeout, STARTUP) if min(board.collectives for board in boards) == 0 else timeout
        if moment > max(board.time for board in boards) + limit:
            return _blame(statuses, boards, folder)
        time.sleep(_PAUSE)


def _status(statuses: Sequence[int], folder: Path) -> int:
    """Give the status of rank 0, or that of another rank whose check failed where rank 0's did not."""
    failed = next((rank for rank, status in enumerate(statuses) if _is_own(status) and status), 0)
    if statuses[0] or not failed:
        return statuses[0]
    error = _last_error(folder, failed)
    tell(f"rank {failed} ended with status {statuses[failed]}{error}, and rank 0 with 0")
    return statuses[failed]


def _is_own(status: int | None) -> bool:
    """Check whether a rank ended with a status of its command."""
    return status is not None and status >= 0 and status not in (LOST, BROKEN)


def _boards(folder: Path, size: int) -> "list[RankProgress]":
    from specsim.core.rank_group import read_board

    return [read_board(folder / f"phase-{rank}") for rank in range(size)]


def _blame(statuses: Sequence[int | None], boards: "Sequence[RankProgress]", folder: Path) -> str:
    """Name the rank that the others waited for: one that was killed, broke, hangs, or is behind."""

    def order(rank: int) -> tuple[int, bool, int]:
        status = statuses[rank]
        if status is not None and status < 0:
            kind = 0
        elif status not in (None, LOST):
            kind = 1
        else:
            kind = 2 if status is None else 3
        return kind, boards[rank].waits, boards[rank].collectives

    rank = min(range(len(statuses)), key=order)
    status, phase = statuses[rank], boards[rank].phase
    others = f"the other {len(statuses) - 1} are ended" if len(statuses) > 2 else "the other one is ended"
    if status is None:
        seconds = time.monotonic() - boards[rank].time
        return f"rank {rank} has not moved for {seconds:.0f} s in phase {phase}, so all ranks are ended"
    if status < 0:
        return f"rank {rank} was killed by signal {-status} in phase {phase}, so {others}"
    return f"rank {rank} ended with status {status} in phase {phase}{_last_error(folder, rank)}, so {others}"


def _last_error(folder: Path, rank: int) -> str:
    """Quote the last line of a rank's errors, which nobody has seen except those of rank 0."""
    file = folder / f"errors-{rank}"
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines() if file.exists() else []
    return f" ({lines[-1].strip()})" if lines else ""
