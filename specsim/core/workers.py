"""Workers, processes that compute calls for the soak, differential, acceptance and sweep commands."""

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import Empty, SimpleQueue
from threading import RLock
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from specsim.core.children import ProcessLost, ProcessThreads, describe_end, end_after, interrupts_held, path_inherited

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


class _Worker(NamedTuple):
    """A process that answers calls, and this side of its pipe."""

    process: SpawnProcess
    pipe: Connection


class Workers(ProcessThreads):
    """Processes that compute calls, ignore interrupts, end at once where this process fails, and never outlive it.

    They are spawned, as a forked process cannot use the parent's GPU. A call whose process ends raises ProcessLost.
    begin: called once in each process.
    """

    def __init__(self, jobs: int, begin: Callable[[], object] | None = None) -> None:
        super().__init__(jobs)
        self._begin = pickle.dumps(begin)
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call, starting a process here where there are too few."""
        if len(self._workers) < self._max_workers:
            self._start()
        return super().submit(self._call, partial(fn, *args, **kwargs))

    def _start(self) -> None:
        context = get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, self._begin))
        with path_inherited():
            if os.name == "posix":
                resource_tracker.ensure_running()  # now, as it unblocks Ctrl-C in this thread
            with interrupts_held():
                process.start()
        other.close()
        self._workers.append(_Worker(process, pipe))
        self.watch(process)
        self._idle.put(self._workers[-1])

    def _call(self, call: Callable[[], Any]) -> Any:
        data = pickle.dumps(call)
        worker = self._idle.get()
        try:
            worker.pipe.send_bytes(data)
            value, error = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join()
            raise ProcessLost(f"worker process {worker.process.pid}", describe_end(worker.process.exitcode)) from None
        finally:
            self._idle.put(worker)
        if error is not None:
            raise error
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls, unless there is an error or an interrupt, and for the processes."""
        super().__exit__(kind, error, trace)
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join()


def _serve(pipe: Connection, begin: bytes) -> None:
    """Answer calls until the pipe is closed; their modules are imported after the watch has begun."""
    from tqdm import tqdm

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for Windows, where no mask blocks it
    if parent := parent_process():
        end_after(parent.join)
    tqdm.set_lock(RLock())  # its own is also a semaphore, which would outlive a killed process
    first = pickle.loads(begin)
    if first is not None:
        first()
    with suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes()))


def _answer(call: bytes) -> bytes:
    """Give the value of a call, or what it raised."""
    try:
        return pickle.dumps((pickle.loads(call)(), None))
    except BaseException as error:
        text = traceback.format_exc()
        error.add_note(f"in a worker process:\n{text}")
        try:
            answer = pickle.dumps((None, error))
            pickle.loads(answer)
        except Exception:
            return pickle.dumps((None, RuntimeError(text)))
        return answer


def finished(
    executor: Executor,
    calls: Mapping[_Key, Callable[[], _Result]],
    describe: Callable[[_Key], str] = str,
    check: Callable[[BaseException | None], object] = lambda _: None,
) -> Iterator[tuple[_Key, _Result]]:
    """Yield the key and result of each call as it ends, and raise what a call raises.

    describe: names the work of a key, for ProcessLost. check: raises ProcessLost where no call can end any more; it is
    called every second without a result, and with what a call has raised.
    """
    done: SimpleQueue[Future[_Result]] = SimpleQueue()
    pending: dict[Future[_Result], _Key] = {}
    try:
        for key, call in calls.items():
            future = executor.submit(call)
            pending[future] = key
            future.add_done_callback(done.put)
        while pending:
            try:
                future = done.get(timeout=1)
            except Empty:
                check(None)
                continue
            key = pending.pop(future)
            try:
                result = _result(future, check)
            except ProcessLost as lost:
                lost.work = describe(key)
                raise
            yield key, result
    finally:
        for future in pending:
            future.cancel()


def _result(future: Future[_Result], check: Callable[[BaseException | None], object]) -> _Result:
    try:
        return future.result()
    except Exception as error:
        check(error)
        raise
