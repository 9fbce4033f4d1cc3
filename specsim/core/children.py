"""Child processes of commands, each with a folder: none outlives its parent, and the folder goes with them.

The command line, correctness and the workers use them. python -m specsim.core.children PIPE FOLDER MODULE ... runs a
module as a child of the process that holds the other end of a pipe.
"""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from os import _exit  # code of a user has another one (core.user_module)
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import Any, NamedTuple, Protocol

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PROCESS_LOST = 3  # exit status of a command
KILLED = (-9, -15)  # status of a process that is killed from outside, by SIGKILL or SIGTERM


class ProcessLost(RuntimeError):
    """A process that ended before its work was done, in one sentence with the work and the results that remain."""

    def __init__(self, process: str, ending: str) -> None:
        super().__init__(process, ending)
        self.process = process
        self.ending = ending
        self.work = ""  # such as a cell
        self.stored = "no result is kept"

    def __str__(self) -> str:
        where = f" in {self.work}" if self.work else ""
        return f"{self.process} {self.ending}{where}; {self.stored}"


def describe_end(status: int | None) -> str:
    """Say how a process ended, from its exit status, which is below 0 for a signal."""
    if status is None or status >= 0:
        return f"ended with exit status {status}"
    name = next((item.name for item in signal.Signals if item == -status), "unknown")
    reason = ", as the system does where memory is short," if name == "SIGKILL" else ""
    return f"was killed by signal {-status} ({name}){reason}"


class KillableProcess(Protocol):
    """A process of the subprocess module, or of multiprocessing."""

    def kill(self) -> None: ...


class ProcessThreads(ThreadPoolExecutor):
    """Threads that wait for processes, which end where this process fails, and the threads with them."""

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs)
        _lifeline()  # one for all threads
        self._lock = Lock()
        self._watched: list[KillableProcess] = []
        self._has_failed = False

    def watch(self, process: KillableProcess) -> None:
        """Take a process that a thread waits for from now on."""
        with self._lock:
            self._watched.append(process)
            if self._has_failed:
                process.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls, or for none of them after an error or an interrupt."""
        if kind is not None:
            self.shutdown(wait=False, cancel_futures=True)
            with self._lock:
                self._has_failed = True
                for process in self._watched:
                    process.kill()
        self.shutdown()


@contextmanager
def interrupts_held() -> Iterator[None]:
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
def path_inherited() -> Iterator[None]:
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


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is removed at the end, or by children of a killed process, or the next process."""
    _remove_stale_folders()
    prefix = f"specsim-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        lock = _lock(Path(name))
        try:
            yield Path(name)
        finally:
            if lock is not None:
                os.close(lock)


@cache
def _remove_stale_folders() -> None:
    """Remove the folders of processes that were killed with all of their children."""
    for folder in Path(tempfile.gettempdir()).glob("specsim-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdecimal() and not _is_alive(int(owner)) and (lock := _lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder until this process ends; None where another has, which may see other process ids than this one."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def child_words(folder: Path, module: str, *arguments: str) -> list[str]:
    """Write the command line of a child, which ends when this process does and then removes the folder."""
    return [sys.executable, "-m", "specsim.core.children", str(_lifeline()), str(folder), module, *arguments]


@cache
def _lifeline() -> int:
    """Open a pipe that only this process could write to: its end is the end of this process."""
    reader, _ = os.pipe()
    return reader


def start_child(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a child that never receives a Ctrl-C; options: of Popen."""
    if os.name == "posix":
        options["pass_fds"] = (_lifeline(),)
    with interrupts_held():
        return subprocess.Popen(words, **options)


class FinishedChild(NamedTuple):
    """A child that has ended."""

    pid: int
    status: int  # exit status, below 0 for a signal
    out: str  # of standard output
    err: str  # of standard error


def run_child(
    words: Sequence[str],
    seconds: float,
    text: str = "",
    watch: Callable[[KillableProcess], None] = lambda _: None,
    **options: Any,
) -> FinishedChild:
    """Run a child to its end; text: its standard input; watch: of the thread that waits for it."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start_child(words, **pipes, text=True, errors="replace", **options) as process:
        watch(process)
        try:
            out, err = process.communicate(text, seconds)
        except BaseException:
            process.kill()
            raise
    return FinishedChild(process.pid, process.returncode, out, err)


def end_after(wait: Callable[[], object], folder: Path | None = None) -> None:
    """Let this process end when a function returns, whatever its threads do, and remove the folder then."""
    Thread(target=_end_after, args=(wait, folder), daemon=True).start()


# For 3 seconds: a process that is still starting may write bytecode into it meanwhile.
_REMOVE = 'for turn in 1 2 3 4 5 6; do rm -rf -- "$@" 2>/dev/null; sleep 0.5; done'


def _end_after(wait: Callable[[], object], folder: Path | None) -> None:
    wait()
    try:
        if folder is not None:
            folders = map(str, _folders_of_owner(folder))
            os.execlp("sh", "sh", "-c", _REMOVE, "sh", *folders)  # in place of this process, which would fill it again
    finally:
        _exit(1)


def _folders_of_owner(folder: Path) -> list[Path]:
    """List a folder of an ended process, and its others, which may have no child that removes them."""
    prefix = re.match(r"specsim-\d+-", folder.name)
    others = folder.parent.glob(f"{prefix[0]}*") if prefix else ()
    return [folder, *(other for other in others if other != folder and _lock(other) is not None)]


def _run_as_child(lifeline: str, folder: str, module: str, *arguments: str) -> None:
    if os.name == "posix":
        reader = int(lifeline)
        os.set_inheritable(reader, False)
        end_after(partial(os.read, reader, 1), Path(folder))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_as_child(*sys.argv[1:])
