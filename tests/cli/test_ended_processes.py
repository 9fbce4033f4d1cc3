"""Commands whose processes end from outside: one sentence, the exit status, and nothing that outlives them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system lists no processes in /proc")

PATIENCE = 300  # seconds; a test waits for what happens, so that a busy machine only makes it slow
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
KERNEL = """import time
def build_tree_kernel_efficient(*arguments):
    while True: time.sleep(1)
"""


class Case(NamedTuple):
    """A command, text in the command lines of its processes, and the sentence about one that is lost."""

    words: str
    mark: str
    lost: str


LIMIT = r"\d+ cases, each call ended after 60 seconds \(--time-limit\)"  # as conformance begins
RANKS = "generate --impl fast --device cpu --tensor-parallel 2 --prompt x"
CELLS = "sweep --out o.sqlite --jobs 2 --output-tokens 100 --vary requests=10000000,10000001"
COMMANDS = {
    "sweep": Case(CELLS, "spawn_main", r"worker process \d+ .*SIGKILL.* in cell requests=\d+; 0 of 2 cells are in o.*"),
    "diff": Case(
        "diff --grid quick --impl reference --jobs 2", "spawn_main", r"worker .*SIGKILL.* in cell .+; no result is kept"
    ),
    "soak": Case("soak", "spawn_main", r"worker process .*SIGKILL.* in program 0-\d+-\d+; no result is kept"),
    "accept": Case("accept --jobs 2", "spawn_main", r"worker .*SIGKILL.* in the run of .+, T=0; no result is kept"),
    "faults": Case("faults", "faults.trial", r"process .*SIGKILL.* in the checks without a fault; no result is kept"),
    "generate": Case(RANKS, "rank_process", r"rank \d was killed by signal 9 in phase start, so the other one is .*"),
    "conformance": Case("conformance --module kernel.py", "spawn_main", ""),
}
SIGNALS = {
    "worker killed": (signal.SIGKILL, "worker", 3),
    "interrupted": (signal.SIGINT, "main", 130),
    "all interrupted": (signal.SIGINT, "group", 130),
    "terminated": (signal.SIGTERM, "main", 143),
    "killed": (signal.SIGKILL, "main", -9),
}
CASES = [
    pytest.param(command, how, id=f"{command} {how}")
    for command in COMMANDS
    for how in SIGNALS
    if (command, how) != ("conformance", "worker killed")  # which is a wrong result of the kernel
]


def members(session: int) -> dict[int, str]:
    """Find the live processes of a session, with their command lines."""
    lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(own_session) == session and state != "Z":
                lines[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
    return lines


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    last = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[[str], subprocess.Popen]]:
    """Start a command in a session of its own, with a folder for temporary files."""
    started = []

    def begin(words: str) -> subprocess.Popen:
        (tmp_path / "temporary").mkdir()
        (tmp_path / "kernel.py").write_text(KERNEL)
        env = os.environ | ENVIRONMENT | {"TMPDIR": str(tmp_path / "temporary")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "specsim", *words.split()]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, **pipes))
        return started[0]

    yield begin
    for process in started:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.by_default(
    "sweep worker killed",
    "sweep all interrupted",
    "sweep terminated",
    "diff worker killed",
    "faults interrupted",
    "faults killed",
    "generate killed",
)
@pytest.mark.parametrize(("command", "how"), CASES)
def test_a_signal_ends_all_processes(start, tmp_path, command, how):
    """Also those that are still starting, as they are here."""
    case, (number, whom, status) = COMMANDS[command], SIGNALS[how]
    process = start(case.words)
    until(lambda: process.poll() is not None or any(case.mark in line for line in members(process.pid).values()))
    if whom == "group":
        os.killpg(process.pid, number)
    else:
        workers = [pid for pid, line in members(process.pid).items() if case.mark in line]
        os.kill(workers[0] if whom == "worker" else process.pid, number)
    out, err = process.communicate(timeout=PATIENCE)
    until(lambda: not members(process.pid) and not [*(tmp_path / "temporary").glob("specsim*")])
    assert (process.returncode, out) == (status, "")
    said = {3: case.lost, 130: "interrupted(; 0 of 2 .*)?", 143: "terminated(; 0 of 2 .*)?"}
    if status in said:
        assert re.fullmatch(f"({LIMIT}\n)?specsim: {said[status]}\n", err)
