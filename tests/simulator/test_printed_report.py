"""Reports printed by clients are read from a log, and rounding to two decimals is never an error."""

import json

import pytest

from specsim.core.errors import InputError
from specsim.simulator.lint import derived, lint
from specsim.simulator.report import read_reports

HEADER = "============ Serving Benchmark Result ============\n"


def wrong(report) -> set[str]:
    return {finding.identity for finding in lint(report) if finding.verdict == "cannot be true"}


def read(tmp_path, text):
    path = tmp_path / "bench.log"
    path.write_text(text)
    return read_reports(path)


@pytest.mark.parametrize("tool", ["vllm", "sglang"])
@pytest.mark.parametrize("lengths", [(128, 129), (2, 300)])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("round_seconds", [0.008, 0.8, 8.0])
@pytest.mark.parametrize("seed", range(3))
def test_printed_reports_are_never_called_impossible(log, tmp_path, tool, lengths, num_drafts, round_seconds, seed):
    """Rates down to one request in some minutes, printed as 0.02 requests per second."""
    served = log(num_drafts, lengths, seed, round_seconds)
    (report,) = read(tmp_path, served.printed(tool))
    assert wrong(report) == set()
    assert report.label == f"{tool}, run 1"
    rate = "Spec Decode Accept Rate (%)"
    expected = {name: round(value, 2) for name, value in served.figures.items() if tool == "vllm" or name != rate}
    assert report.figures == pytest.approx(expected, abs=1e-9)
    assert (report.concurrency, report.completed, report.rate) == (4, 40, None)
    assert (report.input_tokens, report.output_tokens) == (40 * 70, sum(served.tokens))
    assert report.duration == pytest.approx(served.duration, abs=0.005)
    assert derived(report)["prompt"] == 70  # by totals: rates have too few digits
    assert derived(report)["output"] == sum(served.tokens) / 40
    if tool == "vllm":
        counts = (len(served.accepted), num_drafts * len(served.accepted), sum(served.accepted))
        assert (report.num_rounds, report.num_drafts, report.num_accepted_drafts) == counts
        assert report.rates_by_position == pytest.approx(served.rates, abs=5e-5)
    else:
        in_flight = 40 / served.duration * served.figures["Mean E2E Latency (ms)"] / 1e3
        assert report.mean_in_flight == pytest.approx(in_flight, abs=0.005)
        assert report.num_drafts is None


@pytest.mark.parametrize(
    ("tool", "name", "text", "identity"),
    [
        ("vllm", "Accepted tokens", "99999", "accepted ≤ proposed drafts"),
        ("vllm", "Acceptance length", "2.99", "accept length = 1 + Σ rates by position"),
        ("vllm", "Position 2", "99.00", "accept length = 1 + Σ rates by position"),
        ("vllm", "Benchmark duration (s)", "99.00", "throughput · duration = total"),
        ("vllm", "Maximum request concurrency", "3", "requests/s · E2E ≤ concurrency"),
        ("vllm", "Median E2EL (ms)", "99999.00", "median ≤ P99"),
        ("sglang", "Total generated tokens", "9", "throughput · duration = total"),
        ("sglang", "Concurrency", "2.00", "requests/s · E2E ≤ concurrency"),
        ("sglang", "Accept length", "0.90", "accept length = 1 + K · accept rate"),
        ("sglang", "Mean ITL (ms)", "0.10", "ITL / TPOT = tokens a delivery"),
    ],
)
def test_one_wrong_line_is_found(log, tmp_path, tool, name, text, identity):
    lines = log(3, (128, 129)).printed(tool).splitlines()
    (at,) = (index for index, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
    lines[at] = f"{name}: {text}"
    (report,) = read(tmp_path, "\n".join(lines))
    assert identity in wrong(report)


def test_every_report_of_a_log_is_read(log, tmp_path):
    texts = [log(drafts, (9, 30)).printed(tool) for drafts, tool in ((1, "vllm"), (3, "sglang"), (7, "vllm"))]
    reports = read(tmp_path, "INFO starting\n".join(texts))
    assert [report.label for report in reports] == ["vllm, run 1", "sglang, run 2", "vllm, run 3"]
    assert [len(report.rates_by_position) for report in reports] == [1, 0, 7]
    assert list(map(wrong, reports)) == [set()] * 3


def test_older_and_limitless_lines_are_read(tmp_path):
    lines = ["Backend:  sglang-oai", "Traffic request rate:   8.0", "Max request concurrency:   not set   "]
    lines += [
        "Request throughput (req/s):    2.00 ",
        "Total Token throughput (tok/s):   276.00",
        "Mean E2EL (ms): 900.00",
    ]
    (report,) = read(tmp_path, HEADER + "\n".join(lines))
    expected = {
        "Request Throughput (req/s)": 2.0,
        "Total Token Throughput (tok/s)": 276.0,
        "Mean E2E Latency (ms)": 900,
    }
    assert report.figures == expected
    assert (report.label, report.concurrency, report.rate) == ("sglang, run 1", None, 8.0)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("", "file"),
        ("Successful requests: 5", "file"),
        ("Mean TTFT (ms): fast", "mean ttft (ms)"),
        ("Mean TTFT (ms): -1.00", "mean ttft (ms)"),
        ("Mean TTFT (ms): nan", "mean ttft (ms)"),
        ("Mean TTFT (ms): 1.00\nDrafts: many", "drafts"),
    ],
)
def test_a_report_without_figures_is_refused(tmp_path, lines, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        read(tmp_path, HEADER + lines)


def test_the_command_reads_printed_reports(command, log, tmp_path):
    path = tmp_path / "bench.txt"
    path.write_text(log(3, (128, 129)).printed("vllm"))
    assert command("lint-report", str(path)).status == 0
    text = path.read_text()
    accepted = next(line for line in text.splitlines() if line.startswith("Accepted tokens:"))
    drafted = next(line for line in text.splitlines() if line.startswith("Draft tokens:"))
    path.write_text(text.replace(accepted, "Accepted tokens: 900").replace(drafted, "Draft tokens: 300"))
    ended = command("lint-report", str(path))
    assert ended.status == 1
    assert "900 drafts accepted of 300 proposed" in ended.out


def test_details_of_requests_are_compared_with_their_statistics(command, log, tmp_path):
    path = tmp_path / "result.json"
    result = log(3, (128, 129)).result()
    path.write_text(json.dumps(result))
    (report,) = read_reports(path)
    assert wrong(report) == set()
    assert sum(finding.identity == "statistics = those of the requests listed" for finding in lint(report)) == 9
    path.write_text(json.dumps(result | {"mean_ttft_ms": result["mean_ttft_ms"] * 1.5}))
    ended = command("lint-report", str(path))
    assert ended.status == 1
    assert "Mean TTFT (ms)" in ended.out
    path.write_text(json.dumps(result | {"spec_decode_accepted_tokens": 900, "spec_decode_draft_tokens": 300}))
    assert "900 drafts accepted of 300 proposed" in command("lint-report", str(path)).out


@pytest.mark.parametrize("left_out", [["errors"], ["errors", "output_lens"], ["latencies", "itls", "input_lens"]])
def test_details_may_be_fewer(log, tmp_path, left_out):
    result = log(3, (2, 300)).result()
    if "output_lens" in left_out:  # then nothing tells which request failed
        result |= {
            name: values[:-1] for name, values in result.items() if isinstance(values, list) and len(values) == 41
        }
    path = tmp_path / "result.json"
    path.write_text(json.dumps({name: value for name, value in result.items() if name not in left_out}))
    assert wrong(read_reports(path)[0]) == set()


@pytest.mark.parametrize(
    ("wrong_list", "name"),
    [
        ({"ttfts": [0.1]}, "file"),
        ({"ttfts": 0.1}, "ttfts"),
        ({"ttfts": ["fast"] * 41}, "TTFT"),
        ({"ttfts": [-1.0] * 41}, "TTFT"),
        ({"itls": [0.1] * 41}, "itls"),
        ({"output_lens": ["many"] * 41}, "output_lens"),
    ],
)
def test_details_that_are_none_are_refused(log, tmp_path, wrong_list, name):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(log(1, (9, 30)).result() | wrong_list))
    with pytest.raises(InputError, check=lambda error: error.name == name):
        read_reports(path)
