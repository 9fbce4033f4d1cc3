"""Worker processes of the soak, differential and sweep commands."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from types import TracebackType
from typing import Any


class Workers(ProcessPoolExecutor):
    """Processes that ignore interrupts, end at once where this process fails, and never outlive it.

    They are spawned, as a forked process cannot use the parent's GPU. begin: called once in each process.
    """

    def __init__(self, jobs: int, begin: Callable[[], object] | None = None) -> None:
        with _path_inherited():  # also by the process that tracks semaphores
            super().__init__(jobs, get_context("spawn"), _begin, (begin,))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call, starting a process here where there are too few."""
        with _interrupts_held(), _path_inherited():
            return super().submit(fn, *args, **kwargs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls, or for none of them after an error or an interrupt."""
        if kind is None:
            self.shutdown()
            return
        processes = list((self._processes or {}).values())
        manager: Thread | None = self._executor_manager_thread  # pyright: ignore[reportAssignmentType] - wrong stubs
        # Shut down before they end: the executor's thread fails every future that it does not know to be cancelled.
        self.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        # It closes a pipe at its end, to which Python's exit would write meanwhile.
        if manager is not None:
            manager.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block Ctrl-C in this thread, so that a process started meanwhile never receives one."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def python_path() -> dict[str, str]:
    """Make the environment in which a new Python process finds modules where this one does.

    The current folder is not in front, where a file of a user could hide a module of a library.
    """
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}


@contextmanager
def _path_inherited() -> Iterator[None]:
    """Give a process started meanwhile this process's path from its first import on."""
    before = {name: os.environ.get(name) for name in python_path()}
    os.environ |= python_path()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _begin(begin: Callable[[], object] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for Windows, where no mask blocks it
    Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        begin()


def _end_with_parent() -> None:
    """End with the parent, as a worker would otherwise wait for calls for ever."""
    if parent := parent_process():
        parent.join()
    os._exit(1)
