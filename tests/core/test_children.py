"""Child processes, their folders, and threads that wait for them."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from specsim.core import children
from specsim.core.children import ProcessThreads, child_words, describe_end, run_child, temporary_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="without a fork of this system there is no pipe to a child")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """Put temporary folders where only this test has some."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    children._remove_stale_folders.cache_clear()
    return tmp_path


def found_in(folder: Path) -> dict[str, str]:
    """Make an environment in which modules of the folder are found too."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (3, "ended with exit status 3"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-9, "was killed by signal 9 (SIGKILL), as the system does where memory is short,"),
        (-99, "was killed by signal 99 (unknown)"),
    ],
)
def test_an_end_is_described(status, said):
    assert describe_end(status) == said


def test_a_child_reads_and_writes(temporary):
    (temporary / "shout.py").write_text("import sys\nprint(sys.stdin.read().upper(), *sys.argv[1:])\nsys.exit(4)\n")
    with temporary_folder() as folder:
        words = child_words(folder, "shout", "a", "b")
        child = run_child(words, 600, "text", env=os.environ | found_in(temporary))
    assert (child.status, child.out, child.err) == (4, "TEXT a b\n", "")
    assert not folder.exists()


def test_an_error_ends_children_and_what_waits_for_them(temporary):
    """One that starts later too."""
    sleep = partial(run_child, [sys.executable, "-c", "import time; time.sleep(600)"], 600)
    calls = []

    def fail() -> None:
        with ProcessThreads(2) as threads:
            calls.append(threads.submit(sleep, watch=threads.watch))
            calls.append(threads.submit(lambda: (time.sleep(0.5), sleep(watch=threads.watch))[1]))
            while not all(call.running() for call in calls):
                time.sleep(0.01)
            raise ZeroDivisionError

    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert [call.result().status for call in calls] == [-9, -9]
    assert time.monotonic() - begun < 300


# It prints the folder that it has; a child, if there is one, fills it again and again. Another folder has no child.
OWNER = """
import sys
from specsim.core.children import child_words, start_child, temporary_folder
with temporary_folder() as folder, temporary_folder() as other:
    (folder / "file").touch()
    print(folder, flush=True)
    if sys.argv[1:]:
        start_child(child_words(folder, "filler", str(folder)))
    sys.stdin.read()
"""
FILLER = """
import sys, threading, time
def fill():
    while True:
        with open(f"{sys.argv[1]}/filled", "w"): time.sleep(0.01)
threading.Thread(target=fill).start()
fill()
"""


def owner(temporary: Path, *arguments: str) -> tuple[subprocess.Popen, Path]:
    """Start a process that has a temporary folder."""
    (temporary / "filler.py").write_text(FILLER)
    env = os.environ | {"TMPDIR": str(temporary)} | found_in(temporary)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], env=env, **pipes)
    return process, Path(process.stdout.readline().strip())


def test_a_child_ends_with_its_parent_and_removes_the_folder(temporary):
    process, folder = owner(temporary, "with child")
    while not (folder / "filled").exists():
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=300)  # the child has ended too, as it would hold the pipes open
    assert not list(temporary.glob("specsim-*"))


def test_a_folder_of_a_killed_process_is_removed_by_the_next(temporary):
    process, folder = owner(temporary)
    with temporary_folder():
        assert folder.exists()  # its owner lives
    process.kill()
    process.communicate()
    assert folder.exists()
    children._remove_stale_folders.cache_clear()
    held = children._lock(folder)  # as a process does whose id means nothing here
    with temporary_folder():
        assert folder.exists()
    os.close(held)
    children._remove_stale_folders.cache_clear()
    with temporary_folder():
        assert not folder.exists()
