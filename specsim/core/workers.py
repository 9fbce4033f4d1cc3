"""Worker processes of correctness (soak, differential) and of the sweep."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from types import TracebackType
from typing import Any


class Workers(ProcessPoolExecutor):
    """Processes that leave an interrupt to this one, end at once where it fails, and never outlive it.

    They are spawned: a forked one may not use the parent's GPU. begin: called once in each of them.
    """

    def __init__(self, jobs: int, begin: Callable[[], object] | None = None) -> None:
        super().__init__(jobs, get_context("spawn"), _begin, (begin,))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Hand a call to a process, which is started here where there are too few."""
        with _interrupts_held():
            return super().submit(fn, *args, **kwargs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls, or after an error or an interrupt for none of them."""
        if kind is None:
            self.shutdown()
            return
        processes = list((self._processes or {}).values())
        # Before they end: its thread fails all futures but those that it knows to be cancelled.
        self.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back for this thread; a process started meanwhile never sees one, not even while it imports."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(begin: Callable[[], object] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for Windows, where nothing held it back
    Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        begin()


def _end_with_parent() -> None:
    """Wait for the end of the parent: a worker would wait for calls for ever."""
    if parent := parent_process():
        parent.join()
    os._exit(1)
