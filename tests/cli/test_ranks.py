"""Processes of ranks: one that ends or hangs ends all, with a sentence that names it."""

import os
import subprocess
import sys
import time

import pytest

from specsim.cli import ranks
from specsim.cli.ranks import run_ranks
from specsim.core.children import PROCESS_LOST

# Ranks move for ever, or in turn do what a test tells them to do after their start.
BEGIN = """
import os, signal, sys, time
from specsim.core.rank_group import PhaseBoard
board = PhaseBoard.of_process()
rank = int(sys.argv[1])
for _ in range(3):
    board.enter("draft")
    board.wait()
    board.move_on()
board.enter("verify")
"""
MOVE = "while True: board.wait(); board.move_on(); time.sleep(0.02)"
WAIT = "board.wait(); time.sleep(600)"


@pytest.fixture
def run(monkeypatch, capfd):
    """Run two ranks with a program each: (status, what was printed to stderr)."""
    monkeypatch.setattr(ranks, "GRACE", 0.5)

    def start(*programs: str, timeout: float = 60.0) -> tuple[int, str]:
        begun = time.monotonic()
        status = run_ranks(lambda _, rank: [sys.executable, "-c", BEGIN + programs[rank], str(rank)], 2, timeout)
        assert time.monotonic() < begun + 300
        return status, capfd.readouterr().err

    return start


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_status_of_rank_0_is_returned(run, status):
    assert run(f"sys.exit({status})", "sys.exit(0)") == (status, "")


@pytest.mark.parametrize("status", [1, 2])
def test_a_failure_of_another_rank_is_returned(run, status):
    returned, said = run("sys.exit(0)", f"print('wrong', file=sys.stderr); sys.exit({status})")
    assert returned == status
    assert said == f"specsim: rank 1 ended with status {status} (wrong), and rank 0 with 0\n"


def test_a_rank_that_is_done_waits_for_rank_0(run):
    """Rank 0 works alone at the end, for longer than ranks have after a failure."""
    assert run("time.sleep(1.5); sys.exit(1)", "sys.exit(1)") == (1, "")


def test_a_killed_rank_is_named(run):
    status, said = run(WAIT, "os.kill(os.getpid(), signal.SIGKILL)")
    assert status == PROCESS_LOST
    assert said.count("\n") == 1
    assert all(word in said for word in ("rank 1", "signal 9", "phase verify"))


def test_a_rank_with_an_error_is_named_with_it(run):
    status, said = run(WAIT, "print('KeyError: 7', file=sys.stderr); sys.exit(70)")
    assert status == PROCESS_LOST
    assert all(word in said for word in ("rank 1", "KeyError: 7", "phase verify"))


def test_a_rank_that_lost_another_is_not_blamed(run):
    """Rank 0 gives up where rank 1 hangs, and rank 1 is the one that did not come."""
    status, said = run("board.wait(); sys.exit(71)", "time.sleep(600)")
    assert status == PROCESS_LOST
    assert "rank 1 has not moved" in said


def test_ranks_that_hang_are_ended(run):
    status, said = run(WAIT, "time.sleep(600)", timeout=1.0)
    assert status == PROCESS_LOST
    assert said.count("\n") == 1
    assert all(word in said for word in ("rank 1 has not moved", "phase verify"))


def test_ranks_that_move_are_not_ended(run):
    """A rank that works for longer than the timeout is alive as long as it moves."""
    moves = "end = time.monotonic() + 12\nwhile time.monotonic() < end: board.wait(); board.move_on(); time.sleep(0.02)"
    assert run(moves, moves, timeout=10.0) == (0, "")


def test_ranks_of_torchrun_take_part_as_they_are():
    """Rank 0 alone prints."""
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m specsim diff --tensor-parallel 2 --batch 1"
    words = [*command.split(), "--device", "cpu", "--topk", "1", "--num-steps", "2"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("The implementations are equal.") == 1
    assert "1 of 1" in run.stdout
