"""Stale GPU results are planned and run again within a time."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gpu_runs
import pytest
from gpu_runs import UNKNOWN, GpuRun, Machine, main, plan, run_all
from rich.console import Console

from specsim.core.provenance import code_digests

OLD, NEW = ({"versions": {"code": code}} for code in ({"specsim.fast.gone": "1"}, code_digests()))


@pytest.fixture
def kept(tmp_path):
    """Keep a grid, a proof, a suite with some stale groups, and one with a group that has not run."""

    def suite_run(finished: str, **code) -> dict:
        return {"command": "specsim bench --suite round", "finished": finished.split(), "seconds": 60.0} | code

    runs = [suite_run("sameness launches", **OLD), suite_run("rounds forwards invariance modes", **NEW)]
    attention = {"command": "specsim bench --suite baselines --only attention", "finished": ["attention"]}
    results = {
        "diff-full": {"command": "specsim diff --grid full --device cuda", "seconds": 400.0} | OLD,
        "diff-small": {"command": "specsim diff --grid pairwise --device cuda", "seconds": 90.0} | OLD,
        "faults-cuda": {"command": "specsim faults --jobs 9 --device cuda", "seconds": 200.0} | OLD,
        "certify-cuda": {"command": "specsim certify --impl fast --device cuda", "seconds": 70.0} | NEW,
        "soak-cuda": {"command": "specsim soak --device cuda"} | OLD,
        "bench-round": {"suite": "round", "shape": "llama-3-8b", "runs": runs},
        "bench-baselines": {"suite": "baselines", "shape": "llama-3-8b", "runs": [attention | OLD | {"seconds": 5.0}]},
    }
    for name, value in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def test_stale_results_are_planned_in_their_order(kept):
    start = gpu_runs.START
    assert [(run.command.removeprefix("specsim "), run.jobs, run.seconds - start) for run in plan(kept, 8)] == [
        ("faults --device cuda --jobs 5", 5, 200),
        ("soak --device cuda --jobs 2", 2, UNKNOWN),
        ("diff --grid pairwise --device cuda --jobs 3", 3, 30),
        ("bench --suite baselines --only attention", 0, 5),
        ("bench --suite round --only sameness", 0, 10),
        ("bench --suite round --only launches", 0, 10),
        *((f"bench --suite baselines --only {name}", 0, UNKNOWN - start) for name in ("shipped", "shape")),
        ("diff --grid full --device cuda --jobs 8", 8, 50),
    ]
    fresh = {run.name for run in plan(kept, 8, is_whole=True)} - {run.name for run in plan(kept, 8)}
    assert fresh == {
        "certify-cuda",
        *(f"bench-round-{group}" for group in ("rounds", "forwards", "invariance", "modes")),
    }


def run_of(name: str, jobs: int, seconds: float = 0.0) -> GpuRun:
    return GpuRun(name, (name,), jobs, seconds)


def seen_beside(runs: list[GpuRun], machine: Machine, into: Path) -> tuple[dict[str, set[str]], dict[str, tuple]]:
    """Run commands that end when they are read a second time.

    Returns those that were running when each began, itself included, and each one's GPUs and cores.
    """
    alive: set[str] = set()
    seen: dict[str, set[str]] = {}
    places: dict[str, tuple] = {}

    class Process:
        def __init__(self, name: str) -> None:
            self.name, self.polls = name, 0

        def poll(self) -> int | None:
            self.polls += 1
            return 0 if self.polls > 2 else None

        def wait(self) -> int:
            alive.discard(self.name)
            return 0

    def start(run: GpuRun, into: Path, gpus: Sequence[int], cores: range) -> Process:
        alive.add(run.name)
        seen[run.name] = set(alive)
        places[run.name] = (*gpus, cores)
        return Process(run.name)

    outcomes = {run.name: outcome for run, outcome in run_all(runs, into, machine, 1e9, start)}
    assert set(outcomes) == {run.name for run in runs}
    assert all(outcome.startswith("exit status 0 ") for outcome in outcomes.values())
    return seen, places


def test_benchmarks_have_the_only_gpu_for_themselves(tmp_path):
    runs = [run_of("big", 3), run_of("small", 1), run_of("late", 2), run_of("bench", 0), run_of("other", 0)]
    seen, places = seen_beside(runs, Machine(4), tmp_path)
    assert seen["small"] == {"big", "small"}
    assert "big" not in seen["late"]  # five processes would be more than four
    assert (seen["bench"], seen["other"]) == ({"bench"}, {"other"})
    assert set(places.values()) == {(0, range(4))}


def test_benchmarks_run_beside_proofs_on_other_gpus(tmp_path):
    """One of several GPUs runs alone, and the last GPU's benchmark after the proofs."""
    ranks = GpuRun("ranks", ("bench", "--suite", "tensor-parallel"), 0, 0.0)
    runs = [run_of("big", 9), run_of("small", 1), ranks, run_of("bench", 0), run_of("other", 0), run_of("third", 0)]
    seen, places = seen_beside(runs, Machine(18, 2), tmp_path)
    assert seen["bench"] == {"big", "small", "bench"}
    assert seen["ranks"] == {"ranks"}
    assert (places["big"], places["bench"]) == ((1, range(8, 18)), (0, range(8)))
    assert {places["other"][0], places["third"][0]} == {0, 1}
    assert places["ranks"] == (0, 1, range(18))


def test_a_machine_with_few_cores_shares_them():
    assert [Machine(2, 4).cores_of(gpus) for gpus in ((0,), (3,))] == [range(2), range(2)]
    assert Machine(2, 4).shared_cores == 1


def test_commands_without_time_are_not_begun_or_are_killed(tmp_path):
    def start(run, into, gpus, cores):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

    found = list(run_all([run_of("long", 1, 50.0), run_of("slow", 1)], tmp_path, Machine(4), 0.5, start))
    assert [(run.name, outcome.split(" after")[0]) for run, outcome in found] == [
        ("long", "not begun: too little time"),
        ("slow", "exit status -9"),
    ]


def test_a_command_writes_its_result_and_its_log(tmp_path):
    assert gpu_runs.begin(GpuRun("plan", ("plan", "--nope"), 1, 0.0), tmp_path, (0,), (0,)).wait() == 2
    assert "--nope" in (tmp_path / "plan.log").read_text()


def test_without_a_gpu_the_commands_are_only_listed(kept, monkeypatch, capsys):
    monkeypatch.setattr(gpu_runs, "KEPT", kept)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    console = Console(width=120)
    assert main(["--only", "faults"], console) == 2
    assert capsys.readouterr().err == "specsim: no GPU that CUDA can use; --list prints the commands\n"
    assert main(["--list", "--only", "bench"], console) == 0
    assert capsys.readouterr().out.count("specsim bench") == 5
