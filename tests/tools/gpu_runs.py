"""Run kept GPU results again where their code has changed: `python tests/tools/gpu_runs.py --into build/gpu`.

Proofs share the last GPU and the CPU's cores, as each of their processes waits for the host most of the time. A
benchmark has a GPU for itself: with one GPU benchmarks follow the proofs, with several both run at once.
`python -m specsim.maintain.tables build/gpu/*.json` keeps what they wrote.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from specsim.bench.suites import SUITES
from specsim.core.display import print_table, stdout_console
from specsim.maintain.page import ROOT
from specsim.maintain.results import Result, changed_modules, missing_groups, read, runs_of, suite_command

KEPT = ROOT / "fast" / "measurements"
JOBS = {"diff": 3, "faults": 5, "soak": 2}  # processes of a command; one for the others
OWN_CORES = 8  # of every GPU but the last
START = 20.0  # seconds until a command has imported and compiled what it needs
UNKNOWN = 150.0  # seconds of a result that does not name its own
POLL = 0.2  # seconds


@dataclass(frozen=True, slots=True)
class GpuRun:
    """A command whose result is kept."""

    name: str  # of the file that it writes
    arguments: tuple[str, ...]  # of specsim
    jobs: int  # processes; 0 for a benchmark, which needs the GPU for itself
    seconds: float  # expected

    @property
    def command(self) -> str:
        """The command as a user types it."""
        return shlex.join(("specsim", *self.arguments))

    @property
    def needs_ranks(self) -> bool:
        """Whether it is a benchmark of several GPUs."""
        return any(suite.needs_ranks and name in self.arguments for name, suite in SUITES.items())


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores and GPUs on which commands run."""

    cores: int
    gpus: int = 1

    @property
    def shared_cores(self) -> int:
        """Count the cores of the last GPU, on which proofs run."""
        return max(1, self.cores - OWN_CORES * (self.gpus - 1))

    def gpus_for(self, run: GpuRun, alive: Mapping[GpuRun, tuple[int, ...]]) -> tuple[int, ...] | None:
        """Choose GPUs for a command, given the GPUs of those that run; None: it has to wait."""
        last = self.gpus - 1
        if run.needs_ranks or any(other.needs_ranks for other in alive):
            return None if alive else tuple(range(self.gpus))
        if run.jobs:
            used = sum(other.jobs for other in alive)
            is_free = all(other.jobs for other, gpus in alive.items() if last in gpus)
            return (last,) if is_free and (not used or used + run.jobs <= self.shared_cores) else None
        idle = [gpu for gpu in range(self.gpus) if all(gpu not in gpus for gpus in alive.values())]
        return (idle[0],) if idle else None

    def cores_of(self, gpus: Sequence[int]) -> range:
        """List the cores of commands on some GPUs.

        They are all cores where these are too few for each GPU to have its own.
        """
        if self.cores <= OWN_CORES * (self.gpus - 1):
            return range(self.cores)
        return range(OWN_CORES * min(gpus), self.cores if self.gpus - 1 in gpus else OWN_CORES * (max(gpus) + 1))


def reruns(name: str, result: Result, cores: int, again: Callable[[Result], bool]) -> Iterator[GpuRun]:
    """List the runs of a kept result for which `again` holds, and those of groups that it does not have."""
    if "suite" not in result:
        if again(result):
            yield _proof(name, result, cores)
        return
    groups = SUITES[result["suite"]].groups
    for run in filter(again, result["runs"]):
        arguments = tuple(shlex.split(run["command"])[1:])
        seconds = run["seconds"] + START
        if "--only" in arguments or sorted(run["finished"]) == sorted(groups):
            yield GpuRun("-".join((name, *run["finished"])), arguments, 0, seconds)
        else:
            for group in run["finished"]:
                share = run["seconds"] / len(groups) + START
                yield GpuRun(f"{name}-{group}", (*arguments, "--only", group), 0, share)
    for group in missing_groups(result):
        yield GpuRun(f"{name}-{group}", (*suite_command(result).split()[1:], "--only", group), 0, UNKNOWN)


def _proof(name: str, result: Result, cores: int) -> GpuRun:
    arguments = shlex.split(result["command"])[1:]
    if "--jobs" in arguments:
        index = arguments.index("--jobs")
        del arguments[index : index + 2]
    jobs = cores if "full" in arguments else min(cores, JOBS.get(arguments[0], 1))
    seconds = result.get("seconds") or UNKNOWN
    if arguments[0] in JOBS:
        arguments += ["--jobs", str(jobs)]
        seconds = seconds / jobs if arguments[0] == "diff" else seconds  # of all processes of a grid together
    return GpuRun(name, tuple(arguments), jobs, seconds + START)


def plan(folder: Path, cores: int, is_whole: bool = False) -> list[GpuRun]:
    """List the runs of stale results, or of all: proofs, the longest first, then benchmarks, then full grids."""

    def again(result: Result) -> bool:
        return is_whole or any(map(changed_modules, runs_of(result)))

    runs = [run for path in sorted(folder.glob("*.json")) for run in reruns(path.stem, read(path), cores, again)]
    proofs = sorted((run for run in runs if run.jobs), key=lambda run: -run.seconds)
    benchmarks = sorted((run for run in runs if not run.jobs), key=lambda run: run.seconds)
    return sorted([*proofs, *benchmarks], key=lambda run: "full" in run.arguments)


def begin(run: GpuRun, into: Path, gpus: Sequence[int], cores: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a command that writes its result and what it prints to `into`, in a process group of its own.

    gpus, cores: numbers of those that it may use, of this process's.
    """
    command = [sys.executable, "-m", "specsim", *run.arguments, "--json", str(into / f"{run.name}.json")]
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(max(gpus) + 1)))).split(",")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus)}
    own_cores = sorted(os.sched_getaffinity(0))
    with (into / f"{run.name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    os.sched_setaffinity(process.pid, {own_cores[core] for core in cores})
    return process


def run_all(
    runs: Sequence[GpuRun],
    into: Path,
    machine: Machine,
    seconds: float,
    start: Callable[[GpuRun, Path, Sequence[int], Sequence[int]], subprocess.Popen[bytes]] = begin,
) -> Iterator[tuple[GpuRun, str]]:
    """Run commands, and yield each with its outcome when it ends.

    A command that is expected to end after `seconds` is not begun, and one that has not ended by then is killed.
    """
    first = time.monotonic()
    waiting = list(runs)
    alive: dict[GpuRun, tuple[subprocess.Popen[bytes], float, tuple[int, ...]]] = {}
    while waiting or alive:
        for run in list(waiting):
            if time.monotonic() - first + run.seconds > seconds:
                waiting.remove(run)
                yield run, "not begun: too little time"
            elif gpus := machine.gpus_for(run, {other: busy for other, (_, _, busy) in alive.items()}):
                waiting.remove(run)
                alive[run] = start(run, into, gpus, machine.cores_of(gpus)), time.monotonic(), gpus
        for run, (process, began, _) in list(alive.items()):
            now = time.monotonic()
            if process.poll() is None and now - first <= seconds:
                continue
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            del alive[run]
            yield run, f"exit status {process.wait()} after {now - began:.0f} s"
        time.sleep(POLL if alive else 0)


def main(arguments: Sequence[str], console: Console) -> int:
    """Print the runs, or make them; 2 without a GPU, 1 if any did not succeed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path("build/gpu"), help="folder for results and logs")
    parser.add_argument("--only", default="", help="commands that contain this text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing that would end later")
    parser.add_argument("--whole", dest="is_whole", action="store_true", help="results whose code has not changed, too")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    options = parser.parse_args(arguments)
    machine = Machine(len(os.sched_getaffinity(0)), max(1, torch.cuda.device_count()))
    runs = [run for run in plan(KEPT, machine.shared_cores, options.is_whole) if options.only in run.command]
    if options.list or not runs:
        rows = [(run.command, str(run.jobs or "alone"), f"{run.seconds:.0f}") for run in runs]
        print_table(console, ("command", "processes", "seconds"), rows)
        return 0
    if not torch.cuda.is_available():
        print("specsim: no GPU that CUDA can use; --list prints the commands", file=sys.stderr)
        return 2
    options.into.mkdir(parents=True, exist_ok=True)
    failed = 0
    for run, outcome in run_all(runs, options.into, machine, options.seconds):
        failed += not outcome.startswith("exit status 0 ")
        console.print(f"{outcome}: {run.command}", markup=False, highlight=False)
    console.print(
        f"To keep them: python -m specsim.maintain.tables {options.into}/*.json", markup=False, highlight=False
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], stdout_console()))
