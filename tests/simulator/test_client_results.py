"""Results of every benchmark client: the figures of one run."""

import json

import pytest

from specsim.core.errors import InputError
from specsim.simulator.calibration.benchmark_file import Context, read
from specsim.simulator.report import read_reports
from specsim.simulator.results import METRICS

from .client_files import AIPERF, AIPERF_DRAFTS, CLIENTS, GUIDELLM, SGLANG, SPEC, SUMMARY, TENSORRT_LLM, VLLM, figure

FILES = CLIENTS | {"aiperf-drafts.json": json.dumps(AIPERF_DRAFTS), "sglang.jsonl": json.dumps(SGLANG)}
SHARED = {
    "Request Throughput (req/s)": 6.0,
    "Output Throughput (tok/s)": 768.0,
    "Mean TTFT (ms)": 180.0,
    "Mean TPOT (ms)": 19.6,
}
RATES = "spec_decode_per_position_acceptance_rates"
STATES_DRAFTS = ("vllm.json", "vllm.csv", "aiperf-drafts.json")


@pytest.fixture(params=FILES)
def path(tmp_path, request):
    file = tmp_path / request.param
    file.write_text(FILES[request.param])
    return file


def test_a_run_of_every_client_has_its_figures(path):
    (report,) = read_reports(path)
    assert report.label.removesuffix(", run 1") == path.stem.removesuffix("-drafts")
    assert {key: report.figures[key] for key in SHARED} == SHARED
    assert (report.completed, report.input_tokens, report.output_tokens) == (100, 25600, 12800)
    assert report.duration == (None if path.stem == "guidellm" else pytest.approx(100 / 6, abs=1e-4))
    assert report.concurrency == (None if path.suffix == ".txt" else 16)
    assert report.figures.get("Mean E2E Latency (ms)", 2670.0) == 2670.0
    assert report.figures.get("Spec Decode Accept Length", 2.5) == 2.5


def test_a_run_of_every_client_is_a_cell(path):
    """Clients that do not see the engine say nothing of its drafts: the command has to."""
    if path.name not in STATES_DRAFTS:
        with pytest.raises(InputError, check=lambda error: error.name == "num_steps"):
            read(path, Context())
    source, (cell,) = read(path, Context(num_steps=3))
    assert (cell.config.num_steps, cell.batch, cell.prompt_tokens, cell.output_tokens) == (3, 16, 256, 128)
    assert cell.accept_length == (None if path.name in ("guidellm.json", "aiperf.json") else 2.5)
    assert cell.figures == pytest.approx({"tokens_per_s": 768.0, "tpot_s": 0.0196, "ttft_s": 0.18})
    assert source.model == ("org/model" if path.name.startswith(("guidellm", "aiperf")) else "")


def test_vllm_states_all_metrics_but_the_latency_of_a_request(tmp_path):
    (tmp_path / "vllm.json").write_text(json.dumps(VLLM | SPEC))
    (run,) = read_reports(tmp_path / "vllm.json")
    assert set(run.figures) == {name for name in METRICS if "E2E" not in name}
    assert (run.figures["Spec Decode Accept Rate (%)"], run.figures["P99 ITL (ms)"]) == (50, 60)
    assert (run.rates_by_position, run.rate) == ((0.7, 0.5, 0.3), None)


def test_lines_of_sglang_are_runs(tmp_path):
    path = tmp_path / "sglang.jsonl"
    open_loop = SGLANG | {"request_rate": 8.0, "max_concurrency": None}
    path.write_text(
        "\n".join(map(json.dumps, (open_loop, SGLANG | {"request_rate": "trace"}, SGLANG | {"duration": 0})))
    )
    first, second, third = read_reports(path)
    assert (first.label, first.rate, second.rate, first.concurrency) == ("sglang, run 1", 8.0, None, None)
    assert first.figures["Total Token Throughput (tok/s)"] == pytest.approx(2304.0, rel=1e-5)
    assert "Total Token Throughput (tok/s)" not in third.figures


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (json.dumps(GUIDELLM | {"benchmarks": []}), "benchmarks"),
        (json.dumps(GUIDELLM | {"benchmarks": [{"config": {}}]}), "benchmarks"),
        (json.dumps({"aiperf_version": "0.13.0"}), "file"),
        (json.dumps(AIPERF | {"request_throughput": figure(-1.0)}), "request_throughput"),
        (TENSORRT_LLM.replace("Number of requests", "Requests"), "Number of requests"),
        (f"{','.join(SUMMARY)}\n{','.join(['x'] * len(SUMMARY))}\n", "duration"),
        ("", "file"),
        ("{", "file"),
        ("[1]", "file"),
        ("{}", "file"),
        (json.dumps({name: value for name, value in VLLM.items() if name != "output_throughput"}), "file"),
        (json.dumps(VLLM | {"duration": -1}), "duration"),
        (json.dumps(VLLM | {"mean_ttft_ms": "fast"}), "mean_ttft_ms"),
        (json.dumps(VLLM | {"mean_ttft_ms": 10**400}), "mean_ttft_ms"),
        (json.dumps(VLLM | {RATES: [1.5]}), RATES),
    ],
)
def test_results_without_figures_are_refused(text, name, tmp_path):
    file = tmp_path / "result.txt"
    file.write_text(text)
    with pytest.raises(InputError, check=lambda error: error.name == name):
        read_reports(file)
