"""Work of several ranks on this machine, one process each, for checks and tests."""

import os
import pickle
from collections.abc import Callable
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

from specsim.core.children import end_after, temporary_folder
from specsim.core.rank_group import RankGroup, join, leave

_MEETING = 30.0  # seconds after which a rank gives up a collective


class RankFailed(RuntimeError):
    """A rank that raised an error or gave no answer."""


def run_in_ranks(work: Callable[[RankGroup], Any], size: int = 2, timeout: float = 120.0) -> list[Any]:
    """Run a function of a rank group in forked processes, on the CPU, and give what each returns.

    Raises RankFailed with the rank's error where one fails, and for ranks that do not answer within `timeout` seconds.
    """
    context = get_context("fork")
    with temporary_folder() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        arguments = [(work, folder, rank, size, pipe) for rank, (_, pipe) in enumerate(pipes)]
        processes = [context.Process(target=_run, args=values, daemon=True) for values in arguments]
        for process in processes:
            process.start()
        try:
            return _answers([receive for receive, _ in pipes], monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Connection], end: float) -> list[Any]:
    """Receive an answer of each rank, and raise the first error at once."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting: list[Any] = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(waiting, max(0.0, end - monotonic()))
        if not ready:
            silent = [str(rank) for rank in range(len(pipes)) if rank not in answers]
            raise RankFailed(f"no answer of rank {' and '.join(silent)}")
        for pipe in ready:
            rank = pipes.index(pipe)  # pyright: ignore[reportArgumentType]  # one of the pipes
            answers[rank] = pickle.loads(pipes[rank].recv_bytes())
            if isinstance(answers[rank], BaseException):
                raise answers[rank]
    return [answers[rank] for rank in range(len(pipes))]


def _run(work: Callable[[RankGroup], Any], folder: Path, rank: int, size: int, pipe: Connection) -> None:
    if parent := parent_process():
        end_after(parent.join, folder)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        join(size, _MEETING, "cpu", folder, rank)
        group = RankGroup.joined(size)
        answer = group and work(group)
    except BaseException as error:
        answer = RankFailed(f"rank {rank}: {type(error).__name__}: {error}")
    pipe.send_bytes(pickle.dumps(answer))  # torch would share the memory of a process that ends
    leave()
