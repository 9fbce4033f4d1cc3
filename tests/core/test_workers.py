"""Worker processes: their results and how they end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import add
from pickle import PicklingError

import pytest

from specsim.core.children import ProcessLost
from specsim.core.workers import Workers, finished

# It prints the ids of its workers, which are only starting, then the id of one that runs by then.
PARENT = """
import os, sys, time
from specsim.core.workers import Workers
try:
    with Workers(2) as workers:
        calls = [workers.submit(os.getpid), *(workers.submit(time.sleep, float(sys.argv[1])) for _ in range(2))]
        print(*(worker.process.pid for worker in workers._workers), flush=True)
        print(calls[0].result(), flush=True)
        print(calls[1].result(), calls[2].result(), flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def parent():
    """Start a process in its own group, whose two workers sleep for some seconds."""
    started = []

    def start(seconds: float) -> subprocess.Popen:
        words = [sys.executable, "-c", PARENT, str(seconds)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(words, start_new_session=True, **pipes))
        return started[0]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def has_ended(pid: int) -> bool:
    """Check whether a process ends within some seconds."""
    last = time.monotonic() + 20
    while time.monotonic() < last:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_workers_compute():
    with Workers(2) as workers:
        assert list(workers.map(add, (1, 2, 3), (4, 5, 6))) == [5, 7, 9]


def test_no_file_hides_a_library_from_a_worker(tmp_path):
    """Files of the current folder with the names of modules that a starting process imports."""
    for name in ("pickle", "struct", "random", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(0)")
    program = (
        "from specsim.core.workers import Workers\nwith Workers(1) as workers: print(workers.submit(abs, -5).result())"
    )
    words = [sys.executable, "-P", "-c", program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


def test_the_environment_is_as_before_a_worker(monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = {**os.environ}
    with Workers(1) as workers:
        workers.submit(abs, 1)
        assert {**os.environ} == before


def test_no_thread_is_left_after_an_error():
    before = {*threading.enumerate()}
    with suppress(ZeroDivisionError), Workers(2) as workers:
        workers.submit(time.sleep, 60)
        _ = 1 // 0
    assert {*threading.enumerate()} == before


def test_an_error_ends_the_others():
    def fail() -> None:
        with Workers(2) as workers:
            calls = [workers.submit(time.sleep, 90), workers.submit(divmod, 1, 0)]
            calls[1].result()

    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert time.monotonic() - begun < 45


class Unsendable(Exception):
    """An error that cannot be made again from what is pickled of it."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def fail_unsendably() -> None:
    raise Unsendable("no", "copy")


def return_a_lock() -> object:
    return threading.Lock()


# A call, what is raised here, and a part of its text.
FAILURES = {
    "killed": (
        partial(signal.raise_signal, signal.SIGKILL),
        ProcessLost,
        r"SIGKILL.* in call 'bad'; no result is kept",
    ),
    "ends": (partial(os._exit, 7), ProcessLost, r"worker process \d+ ended with exit status 7 in call 'bad'; no"),
    "exits": (partial(sys.exit, 7), SystemExit, "7"),
    "raises": (partial(divmod, 1, 0), ZeroDivisionError, "zero"),
    "raises what cannot be sent": (fail_unsendably, RuntimeError, "Unsendable: no"),
    "returns what cannot be sent": (return_a_lock, TypeError, "pickle"),
    "cannot be sent": (lambda: 1, (AttributeError, PicklingError), "pickle"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_call_that_fails_is_named(how):
    """The first call of each worker succeeds, and none of the later ones is waited for."""
    call, error, said = FAILURES[how]
    calls = {"good": partial(abs, -1), "bad": call, **{f"late {index}": partial(time.sleep, 600) for index in range(4)}}
    results = {}

    def run() -> None:
        with Workers(1) as workers:
            results.update(finished(workers, calls, "call {!r}".format))

    with pytest.raises(error, match=said):
        run()
    assert results == {"good": 1}


def test_a_check_ends_calls_that_cannot_end():
    def check(error: BaseException | None) -> None:
        raise ProcessLost("the cluster", f"saw {error}")

    with pytest.raises(ProcessLost, match="the cluster saw None; no result is kept"), Workers(1) as workers:
        list(finished(workers, {"endless": partial(time.sleep, 600)}, check=check))


needs_groups = pytest.mark.skipif(not hasattr(os, "killpg"), reason="this system has no groups of processes")


@needs_groups
@pytest.mark.parametrize("lines", [1, 2], ids=["while they start", "while they work"])
def test_workers_ignore_an_interrupt_of_their_parent(parent: Callable, lines: int):
    process = parent(1)
    read = [process.stdout.readline() for _ in range(lines)]
    for worker in map(int, read[0].split()):
        os.kill(worker, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out.splitlines()[-1], err) == ("None None", "")


@needs_groups
def test_an_interrupt_ends_workers_at_once(parent: Callable):
    process = parent(600)
    workers = list(map(int, process.stdout.readline().split()))
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60) == ("interrupted\n", "")
    assert all(map(has_ended, workers))


@needs_groups
def test_workers_end_with_their_parent(parent: Callable):
    process = parent(600)
    workers = list(map(int, process.stdout.readline().split()))
    process.stdout.readline()
    process.kill()
    process.wait()
    assert all(map(has_ended, workers))
