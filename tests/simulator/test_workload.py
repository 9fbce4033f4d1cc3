"""Workloads and the files they come from; benchmark results of vLLM and SGLang."""

import json

import numpy as np
import pytest

from specsim.core.errors import InputError
from specsim.simulator.measurement import METRICS, read_measurements
from specsim.simulator.workload import Workload, bursts, closed_loop, poisson, read_workload

LATENCY = {f"{how}_{what}_ms": 1.5 for how in ("mean", "median", "p99") for what in ("ttft", "tpot", "itl")}
COUNTS = {"duration": 2.0, "completed": 4, "total_input_tokens": 40, "total_output_tokens": 512}
THROUGHPUT = {"request_throughput": 2.0, "output_throughput": 256.0}
VLLM = COUNTS | LATENCY | THROUGHPUT
VLLM |= {"total_token_throughput": 276.0, "request_rate": "inf", "max_concurrency": 4}
VLLM |= {"spec_decode_acceptance_length": 2.5, "spec_decode_acceptance_rate": 50.0}
VLLM |= {"spec_decode_per_position_acceptance_rates": [0.7, 0.5, 0.3]}
SGLANG = COUNTS | LATENCY | THROUGHPUT
SGLANG |= {"mean_e2e_latency_ms": 900.0, "accept_length": 2.5, "request_rate": 8.0, "max_concurrency": None}


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


def test_bursts_come_together():
    assert bursts(5, 2, 1.5, 10, 10).arrivals_s.tolist() == [0, 0, 1.5, 1.5, 3]


def test_a_file_is_sorted_by_arrival(tmp_path):
    path = tmp_path / "load.jsonl"
    rows = [{"arrival_s": at, "prompt_tokens": 5, "output_tokens": size} for at, size in ((2.5, 1), (0, 2), (2.5, 3))]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    load = read_workload(path)
    assert load.arrivals_s.tolist() == [0, 2.5, 2.5]
    assert load.output_tokens.tolist() == [2, 1, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 2}', "arrival_s is a number of at least 0, not -1"),
        ('{"arrival_s": NaN, "prompt_tokens": 5, "output_tokens": 2}', "arrival_s is a number of at least 0, not nan"),
        (f'{{"arrival_s": 1{"0" * 400}, "prompt_tokens": 5, "output_tokens": 2}}', "number of at least 0, not 10000"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 2}', "prompt_tokens is an integer of at least 1"),
        ('{"arrival_s": 0, "prompt_tokens": 5}', "a JSON object of arrival_s, prompt_tokens, output_tokens"),
        ("no JSON", "a JSON object"),
        ("", "at least one request"),
    ],
)
def test_a_bad_file_of_requests_is_refused(tmp_path, line, message):
    path = tmp_path / "load.jsonl"
    path.write_text(line)
    with pytest.raises(InputError, match=message):
        read_workload(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: closed_loop(1, 1, 1, 1, -1), r"seed is -1; allowed: an integer from 0 to 2\^64 - 1"),
        (lambda: closed_loop(1, 1, 1, 1, 2**64), "seed is 18446744073709551616"),
        (lambda: closed_loop(0, 1, 1, 1), "num_requests is 0"),
        (lambda: closed_loop(4, 0, 1, 1), "concurrency is 0"),
        (lambda: closed_loop(4, 1, (5, 4), 1), "prompt_tokens is 4; allowed: an integer from 5"),
        (lambda: poisson(4, 0, 1, 1), "rate is 0; allowed: a number above 0"),
        (lambda: poisson(4, float("inf"), 1, 1), "rate is inf"),
        (lambda: poisson(4, 10**400, 1, 1), "rate is 10"),
        (lambda: bursts(4, 2, -1.0, 1, 1), "every_s is -1.0"),
        (lambda: Workload(np.array([1]), np.array([1])), "concurrency is None"),
        (lambda: Workload(np.array([1, 1]), np.array([1, 1]), np.array([1.0, 0.5])), "in order"),
        (lambda: Workload(np.array([1]), np.array([1]), np.array([-1.0])), "seconds of at least 0"),
        (lambda: Workload(np.array([1.5]), np.array([1]), np.array([0.0])), "prompt_tokens"),
    ],
)
def test_impossible_workloads_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_vllm_results_are_read(tmp_path):
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(VLLM))
    (run,) = read_measurements(path)
    assert (run.tool, run.completed, run.concurrency, run.rate) == ("vllm", 4, 4, None)
    assert run.metrics["Spec Decode Accept Rate (%)"] == 50
    assert run.metrics["P99 ITL (ms)"] == 1.5
    assert set(run.metrics) == {name for name in METRICS if "E2E" not in name}
    assert run.rates_by_position == (0.7, 0.5, 0.3)


def test_sglang_results_are_read_line_by_line(tmp_path):
    path = tmp_path / "sglang.jsonl"
    path.write_text(json.dumps(SGLANG) + "\n" + json.dumps(SGLANG | {"request_rate": "trace"}) + "\n")
    first, second = read_measurements(path)
    assert (first.tool, first.rate, second.rate, first.concurrency) == ("sglang", 8.0, None, None)
    assert first.metrics["Mean E2E Latency (ms)"] == 900
    assert first.metrics["Total Token Throughput (tok/s)"] == (40 + 512) / 2
    path.write_text(json.dumps(SGLANG | {"duration": 0}))
    assert "Total Token Throughput (tok/s)" not in read_measurements(path)[0].metrics


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("{", "JSON"),
        ("[1]", "a JSON object for each run"),
        ("{}", "it has no duration"),
        (json.dumps({name: value for name, value in VLLM.items() if name != "output_throughput"}), "output_throughput"),
        (json.dumps(VLLM | {"duration": -1}), "duration is -1; allowed: a number of at least 0"),
        (json.dumps(VLLM | {"mean_ttft_ms": "fast"}), "mean_ttft_ms is 'fast'"),
        (json.dumps(VLLM | {"mean_ttft_ms": 10**400}), "mean_ttft_ms is 1000"),
        (json.dumps(VLLM | {"spec_decode_per_position_acceptance_rates": [1.5]}), "from 0 to 1"),
    ],
)
def test_foreign_results_are_refused(tmp_path, text, message):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_measurements(path)
