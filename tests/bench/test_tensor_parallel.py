"""Rounds on several ranks: checked and timed alike by all of them, and compared with the simulator."""

from functools import partial

import pytest
import torch

import specsim.bench.scene
from specsim.bench import session, tensor_parallel
from specsim.bench.row import OURS, BenchRow, Check, Timing
from specsim.bench.suites import Options, Suite
from specsim.bench.tensor_parallel import (
    ONE,
    agreed,
    expected,
    expected_exchange,
    round_row,
    shape_of,
    share_row,
    slowest,
)
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.core.rank_group import PhaseBoard, RankGroup
from specsim.correctness.differential.pairs import rounded
from specsim.models.shapes import shape
from specsim.models.synthetic_pair import synthetic_pair
from specsim.simulator import hardware

TREE = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4)
PASSED = Check("numbers", 0.0, 0)
# Their tensors are on the CPU, where kernels run only if they are interpreted.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of this machine run on its GPU")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(specsim.bench.scene, "SLACK", 16)
    monkeypatch.setattr(tensor_parallel, "SEQ_LEN", 9)
    monkeypatch.setattr(tensor_parallel, "SPECULATIVE", TREE)
    return rounded(synthetic_pair("eagle3", "qwen3"), torch.bfloat16)


def _time(scene):
    return Timing(60.0 if scene.engine.options.tensor_parallel == 2 else 100.0, 1.0, 9)


def _row(pair, ranks):
    return round_row("tiny", pair, 1, ranks, "cpu", _time)


@interpreted
def test_a_round_of_two_ranks_is_checked_and_timed(small, in_ranks):
    rows = in_ranks(partial(_row, small))
    assert repr(rows[0]) == repr(rows[1])
    row = rows[0]
    assert row.passed, row.checks
    assert {name: timing.median_us for name, timing in row.timings.items()} == {OURS: 60.0, ONE: 100.0}
    (target,) = row.targets
    assert (target.value, target.reached) == (0.6, True)


def _row_where_rank_1_differs(pair, ranks):
    drawn = tensor_parallel.digests
    tensor_parallel.digests = lambda output: drawn(output) | ({"draft_input.hidden": "other"} if ranks.rank else {})
    return round_row("tiny", pair, 1, ranks, "cpu", _time)


@interpreted
def test_no_rank_times_a_round_that_differs_on_one(small, in_ranks):
    for row in in_ranks(partial(_row_where_rank_1_differs, small)):
        assert not row.checks[OURS].passed
        assert "draft_input.hidden of rank 1 is not that of rank 0" in row.checks[OURS].difference
        assert set(row.timings) == {ONE}
        assert row.targets == ()


def _agreed(ranks):
    own = Check("numbers", float(ranks.rank), 0, "entry 3" if ranks.rank else "")
    return agreed(ranks, own), slowest(ranks, Timing(5.0 + ranks.rank, 1.0, 9))


def test_a_failed_check_and_the_longest_time_of_any_rank_count(in_ranks):
    for check, timing in in_ranks(_agreed):
        assert not check.passed
        assert "entry 3" in check.difference
        assert timing.median_us == 6.0


def _rows_within(ranks):
    """Run a suite in which time is over on rank 1 after the first row."""
    row = BenchRow("op", {}, {OURS: PASSED})
    session.SUITES = {"tensor-parallel": Suite({"some": lambda *_: iter([row] * 3)}, 60, False, needs_ranks=True)}
    seconds = 1e-9 if ranks.rank else 60.0
    return len(session.bench(Options("tensor-parallel", seconds=seconds, tensor_parallel=2)).rows)


def test_all_ranks_end_after_the_same_row(in_ranks):
    assert in_ranks(_rows_within) == [1, 1]


@pytest.mark.parametrize(("suite", "size"), [("tensor-parallel", 1), ("round", 2)])
def test_only_this_suite_has_ranks(suite, size):
    with pytest.raises(InputError, check=lambda error: error.name == "tensor_parallel"):
        session.check_options(Options(suite, tensor_parallel=size))


def test_kernels_of_exchanges_are_told_from_others():
    ranks = RankGroup(0, 2, PhaseBoard())
    kernels = {"ncclDevKernel_AllGather": 6.0, "_sum_kernel": 2.0, "_linear_kernel": 24.0}
    row = share_row("tiny", 1, ranks, PASSED, [kernels, {}])
    assert row.notes == ("rank 0: exchanges 8 of 32 us of kernels a round, 25.0%",)


def test_the_simulator_knows_the_shape_of_a_pair():
    config = shape("llama-2-70b-tp2-slice").config
    made = shape_of(config)
    assert (made.num_layers, made.hidden_size, made.vocab_size) == (80, 8192, 16000)
    assert made.kv_bytes_per_token == 2 * 2 * 80 * 4 * 128


def test_the_simulator_expects_more_than_half_the_time(monkeypatch):
    """Its exchanges are those of two ranks, and their share is what is not divided by two."""
    monkeypatch.setattr(tensor_parallel, "this_gpu", lambda: hardware("H200"))
    tree = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8)
    found = expected(shape("llama-3-8b").config, 32000, 2, 1, tree, 1024)
    assert found is not None
    assert 0.5 < found.ratio < 1.0
    one = expected_exchange(2, 8 * 4096 * 2)
    assert one is not None
    assert 65 * one < found.exchanges < 80 * one  # of the target's layers and of three forwards of the drafter
    assert 0 < found.share < 1


def test_a_gpu_without_figures_has_no_expectation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert tensor_parallel.this_gpu() == hardware("H200")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Another GPU")
    assert expected_exchange(2, 8) is None
