"""Results of every benchmark client: the figures of one run, written down here as each client writes them."""

import json

import pytest

from specsim.core.errors import InputError
from specsim.simulator.calibration.benchmark_file import Context, read
from specsim.simulator.report import read_reports


def statistics(mean: float, median: float, p99: float, total: float = 0.0) -> dict:
    """A distribution of GuideLLM."""
    return {"successful": {"mean": mean, "median": median, "percentiles": {"p99": p99}, "total_sum": total}}


def figure(average: float, median: float | None = None, p99: float | None = None) -> dict:
    """A figure of AIPerf."""
    return {"unit": "x", "avg": average, "p50": median, "p99": p99}


GUIDELLM = {
    "config": {"backend": {"model": "org/model"}},
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "concurrent", "streams": 16}},
            "metrics": {
                "request_totals": {"successful": 100},
                "requests_per_second": statistics(6.0, 6.0, 7.8),
                "output_tokens_per_second": statistics(768.0, 768.0, 900.0),
                "tokens_per_second": statistics(2304.0, 2304.0, 2500.0),
                "request_latency": statistics(2.67, 2.6, 3.5),
                "prompt_token_count": statistics(256.0, 256.0, 256.0, 25600.0),
                "output_token_count": statistics(128.0, 128.0, 128.0, 12800.0),
                "time_to_first_token_ms": statistics(180.0, 175.0, 230.0),
                "time_per_output_token_ms": statistics(20.9, 20.9, 27.0),  # with the first token, which TPOT leaves out
                "inter_token_latency_ms": statistics(19.6, 19.5, 25.0),
            },
        }
    ],
}
AIPERF = {
    "aiperf_version": "0.13.0",
    "request_throughput": figure(6.0),
    "output_token_throughput": figure(768.0),
    "benchmark_duration": figure(100 / 6),
    "request_count": figure(100),
    "total_isl": figure(25600),
    "total_osl": figure(12800),
    "request_latency": figure(2670.0, 2600.0, 3500.0),
    "time_to_first_token": figure(180.0, 175.0, 230.0),
    "inter_token_latency": figure(19.6, 19.5, 25.0),
    "inter_chunk_latency": figure(45.0, 44.0, 60.0),
    "input_config": {"models": ["org/model"], "phases": [{"concurrency": 16}]},
}
AIPERF_DRAFTS = AIPERF | {
    "spec_decode_token_weighted_acceptance_length": figure(2.5),
    "spec_decode_overall_draft_acceptance_rate": figure(50.0),
    "total_spec_decode_steps": figure(4000),
    "total_accepted_draft_tokens": figure(6000),
    "total_draft_tokens": figure(12000),
}
TENSORRT_LLM = """[I] = REQUEST DETAILS
Number of requests:             100
Number of concurrent requests:  16.0200
Average Input Length (tokens):  256.0000
Average Output Length (tokens): 128.0000
= PERFORMANCE OVERVIEW
Request Throughput (req/sec):                     6.0000
Total Output Throughput (tokens/sec):             768.0000
Total Token Throughput (tokens/sec):              2304.0000
Total Latency (ms):                               16666.6667
Average request latency (ms):                     2670.0000
Average time-to-first-token [TTFT] (ms):          180.0000
Average time-per-output-token [TPOT] (ms):        19.6000
[AL] MINIMUM: 2.05
[AL] AVERAGE: 2.50
"""
VLLM = {
    "run_number": 0, "max_concurrency": 16, "request_rate": "inf", "completed": 100, "duration": 16.6667,
    "total_input_tokens": 25600, "total_output_tokens": 12800, "request_throughput": 6.0, "output_throughput": 768.0,
    "mean_ttft_ms": 180.0, "mean_tpot_ms": 19.6, "spec_decode_acceptance_length": 2.5, "spec_decode_num_drafts": 4000,
    "spec_decode_draft_tokens": 12000,
}  # fmt: skip
FILES = {
    "guidellm": json.dumps(GUIDELLM),
    "aiperf": json.dumps(AIPERF),
    "aiperf with drafts": json.dumps(AIPERF_DRAFTS),
    "tensorrt-llm": TENSORRT_LLM,
    "vllm list": json.dumps([VLLM]),
    "vllm csv": f"{','.join(VLLM)}\n{','.join(map(str, VLLM.values()))}\n",
}
SHARED = {
    "Request Throughput (req/s)": 6.0,
    "Output Throughput (tok/s)": 768.0,
    "Mean TTFT (ms)": 180.0,
    "Mean TPOT (ms)": 19.6,
}
STATES_DRAFTS = ("vllm list", "vllm csv", "aiperf with drafts")


@pytest.fixture
def path(tmp_path, request):
    file = tmp_path / ("summary.csv" if "csv" in request.param else "result.txt")
    file.write_text(FILES[request.param])
    return file


@pytest.mark.parametrize(("path", "name"), [(name, name) for name in FILES], indirect=["path"], ids=FILES)
def test_a_run_of_every_client_has_its_figures(path, name):
    (report,) = read_reports(path)
    assert report.label == f"{name.split()[0]}, run 1"
    assert {key: report.figures[key] for key in SHARED} == SHARED
    assert (report.completed, report.input_tokens, report.output_tokens) == (100, 25600, 12800)
    assert report.concurrency == (None if name == "tensorrt-llm" else 16)
    assert report.figures.get("Mean E2E Latency (ms)", 2670.0) == 2670.0
    assert report.figures.get("Spec Decode Accept Length", 2.5) == 2.5


@pytest.mark.parametrize(("path", "name"), [(name, name) for name in FILES], indirect=["path"], ids=FILES)
def test_a_run_of_every_client_is_a_cell(path, name):
    """Clients that do not see the engine say nothing of its drafts: the command has to."""
    if name not in STATES_DRAFTS:
        with pytest.raises(InputError, check=lambda error: error.name == "num_steps"):
            read(path, Context())
    source, (cell,) = read(path, Context(num_steps=3))
    assert (cell.config.num_steps, cell.batch, cell.prompt_tokens, cell.output_tokens) == (3, 16, 256, 128)
    assert cell.accept_length == (None if name in ("guidellm", "aiperf") else 2.5)
    assert cell.figures == pytest.approx({"tokens_per_s": 768.0, "tpot_s": 0.0196, "ttft_s": 0.18})
    assert source.model == ("org/model" if "guidellm" in name or "aiperf" in name else "")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (json.dumps(GUIDELLM | {"benchmarks": []}), "benchmarks"),
        (json.dumps(GUIDELLM | {"benchmarks": [{"config": {}}]}), "benchmarks"),
        (json.dumps({"aiperf_version": "0.13.0"}), "file"),
        (json.dumps(AIPERF | {"request_throughput": figure(-1.0)}), "request_throughput"),
        (TENSORRT_LLM.replace("Number of requests", "Requests"), "Number of requests"),
        (f"{','.join(VLLM)}\n{','.join(['x'] * len(VLLM))}\n", "duration"),
    ],
)
def test_results_without_figures_are_refused(text, name, tmp_path):
    file = tmp_path / "result.txt"
    file.write_text(text)
    with pytest.raises(InputError, check=lambda error: error.name == name):
        read_reports(file)
