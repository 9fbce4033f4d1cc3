"""Workloads and the files they come from."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specsim.core.errors import InputError
from specsim.simulator.workload import SimulatedWorkload, closed_loop, parse_workload, poisson


def test_lengths_are_drawn_evenly_and_by_seed():
    load = closed_loop(10_000, 8, (10, 19), 128, seed=1)
    counts = np.bincount(load.prompt_tokens, minlength=20)
    assert counts[:10].sum() == 0
    assert np.abs(counts[10:] - 1000).max() < 5 * 30  # 5 standard deviations of a binomial count
    assert set(load.output_tokens) == {128}
    assert (closed_loop(10_000, 8, (10, 19), 128, seed=1).prompt_tokens == load.prompt_tokens).all()
    assert (closed_loop(10_000, 8, (10, 19), 128, seed=2).prompt_tokens != load.prompt_tokens).any()


def test_poisson_arrivals_come_at_their_rate():
    gaps = np.diff(poisson(10_000, 4.0, 10, 10).arrivals_s)
    assert gaps.mean() == pytest.approx(0.25, abs=5 * 0.25 / 100)
    assert gaps.std() == pytest.approx(0.25, abs=0.02)


def test_a_file_is_sorted_by_arrival(tmp_path):
    path = tmp_path / "load.jsonl"
    rows = [{"arrival_s": at, "prompt_tokens": 5, "output_tokens": size} for at, size in ((2.5, 1), (0, 2), (2.5, 3))]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    load = parse_workload(path.read_text(), str(path))
    assert load.arrivals_s.tolist() == [0, 2.5, 2.5]
    assert load.output_tokens.tolist() == [2, 1, 3]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 2}', "arrival_s"),
        ('{"arrival_s": NaN, "prompt_tokens": 5, "output_tokens": 2}', "arrival_s"),
        (f'{{"arrival_s": 1{"0" * 400}, "prompt_tokens": 5, "output_tokens": 2}}', "arrival_s"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 2}', "prompt_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 5}', "JSON object"),
        ("no JSON", "JSON object"),
        ("", "at least one request"),
    ],
)
def test_a_bad_file_of_requests_is_refused(tmp_path, line, field):
    path = tmp_path / "load.jsonl"
    path.write_text(line)
    with pytest.raises(InputError, check=lambda error: error.name == "workload" and field in error.allowed):
        parse_workload(path.read_text(), str(path))


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: closed_loop(1, 1, 1, 1, -1), "seed", -1),
        (lambda: closed_loop(1, 1, 1, 1, 2**64), "seed", 2**64),
        (lambda: closed_loop(0, 1, 1, 1), "num_requests", 0),
        (lambda: closed_loop(4, 0, 1, 1), "concurrency", 0),
        (lambda: closed_loop(4, 1, (5, 4), 1), "prompt_tokens", 4),
        (lambda: poisson(4, 0, 1, 1), "rate", 0),
        (lambda: poisson(4, float("inf"), 1, 1), "rate", float("inf")),
        (lambda: poisson(4, 10**400, 1, 1), "rate", 10**400),
        (lambda: SimulatedWorkload(np.array([1]), np.array([1])), "concurrency", None),
        (lambda: SimulatedWorkload(np.array([1, 1]), np.array([1, 1]), np.array([1.0, 0.5])), "arrivals_s", [1, 0.5]),
        (lambda: SimulatedWorkload(np.array([1]), np.array([1]), np.array([-1.0])), "arrivals_s", [-1]),
        (lambda: SimulatedWorkload(np.array([1]), np.array([1]), np.array([1e300])), "arrivals_s", [1e300]),
        (lambda: SimulatedWorkload(np.array([1.5]), np.array([1]), np.array([0.0])), "prompt_tokens", [1.5]),
        (lambda: replace(closed_loop(5, 5, 10, 1), intake=-1), "intake", -1),
        (lambda: replace(closed_loop(5, 5, 10, 1), intake=float("inf")), "intake", float("inf")),
        (lambda: replace(closed_loop(5, 5, 10, 1), latency=10**400), "latency", 10**400),
    ],
)
def test_impossible_workloads_are_refused(make, name, value):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        make()
