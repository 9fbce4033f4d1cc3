import json
from dataclasses import replace

import pytest

from specsim.cli.lint_report import SHOWN, show
from specsim.core.display import stdout_console
from specsim.core.errors import InputError
from specsim.simulator.lint import IDENTITIES, NOTHING_STATED, Stated, derived, lint
from specsim.simulator.measurement import Report
from specsim.simulator.report import read_reports
from specsim.simulator.reproduce.reproduction import TABLES
from specsim.simulator.results import METRICS

VLLM_41162 = TABLES / "vllm_41162.csv"


def wrong(report, stated=NOTHING_STATED):
    return {finding.identity for finding in lint(report, stated) if finding.verdict == "cannot be true"}


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("lengths", [(128, 129), (2, 300)])
@pytest.mark.parametrize("seed", range(5))
def test_what_a_log_gives_is_never_called_impossible(served, num_drafts, lengths, seed):
    report = served(num_drafts, lengths, seed)
    assert set(report.figures) == set(METRICS)
    assert wrong(report) == set()
    silent = {"median ≤ P99", "accepted ≤ proposed drafts", "statistics = those of the requests listed"}
    assert {finding.identity for finding in lint(report)} == set(IDENTITIES) - silent


@pytest.mark.parametrize(
    ("figure", "factor", "identity"),
    [
        ("Spec Decode Accept Length", 1.02, "accept length = 1 + K · accept rate"),
        ("Spec Decode Accept Rate (%)", 0.97, "accept length = 1 + K · accept rate"),
        ("Spec Decode Accept Length", 0.99, "accept length = 1 + Σ rates by position"),
        ("Spec Decode Accept Length", 0.1, "accept length = 1 + K · accept rate"),
        ("Spec Decode Accept Rate (%)", 9.0, "accept length = 1 + K · accept rate"),
        ("Mean E2E Latency (ms)", 0.01, "E2E = TTFT + (L - 1) · TPOT"),
        ("Mean E2E Latency (ms)", 1.3, "requests/s · E2E ≤ concurrency"),
        ("Request Throughput (req/s)", 1.3, "requests/s · E2E ≤ concurrency"),
        ("Output Throughput (tok/s)", 1.01, "throughput · duration = total"),
        ("Total Token Throughput (tok/s)", 0.5, "throughput · duration = total"),
        ("Median ITL (ms)", 5.0, "median ≤ P99"),
        ("Mean ITL (ms)", 0.2, "ITL / TPOT = tokens a delivery"),
    ],
)
def test_one_wrong_figure_is_found(served, figure, factor, identity):
    report = served(3, (128, 129))
    assert identity in wrong(replace(report, figures=report.figures | {figure: report.figures[figure] * factor}))


@pytest.mark.parametrize(
    ("figures", "identity"),
    [
        ({"Spec Decode Accept Rate (%)": 0.0}, "accept length = 1 + K · accept rate"),
        ({"Mean E2E Latency (ms)": 0.0}, "E2E = TTFT + (L - 1) · TPOT"),
        ({"Output Throughput (tok/s)": 0.0}, "E2E = TTFT + (L - 1) · TPOT"),
    ],
)
def test_a_figure_of_0_is_one_that_the_report_has(served, figures, identity):
    report = served(3, (128, 129))
    assert identity in wrong(replace(report, figures=report.figures | figures), Stated(output_tokens=128))


def test_nothing_accepted_is_one_token_a_round(served):
    report = served(3, (128, 129))
    nothing = {"Spec Decode Accept Length": 1.0, "Spec Decode Accept Rate (%)": 0.0}
    (first, *_) = lint(replace(report, figures=nothing, rates_by_position=()))
    assert (first.identity, first.verdict) == ("accept length = 1 + K · accept rate", "holds")
    assert derived(replace(report, figures=nothing))["drafts"] is None


def test_an_idle_server_has_no_requests_under_way():
    idle = Report("idle", {"Request Throughput (req/s)": 0.0, "Mean E2E Latency (ms)": 9.0})
    assert derived(idle) == {"prompt": None, "output": None, "by times": None, "drafts": None, "under way": 0}


@pytest.mark.parametrize("factor", [0.7, 0.99, 1.01, 1.3])
def test_a_stated_length_shows_a_wrong_tpot(factor):
    (report,) = (each for each in read_reports(VLLM_41162) if each.label == "Llama3 8B · 0.0 · 16 · before")
    changed = replace(report, figures=report.figures | {"Mean TPOT (ms)": factor * report.figures["Mean TPOT (ms)"]})
    assert wrong(changed) == set()  # outputs could differ in length
    assert wrong(changed, Stated(output_tokens=128)) == {"E2E = TTFT + (L - 1) · TPOT"}


@pytest.mark.parametrize(("factor", "is_true"), [(1.0, True), (1.05, True), (1.07, False), (1.3, False)])
def test_requests_under_way_follow_from_tpot_without_e2e_latency(factor, is_true):
    """TTFT and 127 TPOT give 15.14 requests under way, of at most 16."""
    (report,) = (each for each in read_reports(VLLM_41162) if each.label == "Llama3 8B · 0.0 · 16 · before")
    figures = {name: value for name, value in report.figures.items() if "E2E" not in name}
    changed = replace(report, figures=figures | {"Mean TPOT (ms)": factor * figures["Mean TPOT (ms)"]})
    assert "requests/s · E2E ≤ concurrency" not in {finding.identity for finding in lint(changed)}
    found = [each for each in lint(changed, Stated(output_tokens=128)) if each.identity.startswith("requests/s")]
    assert [each.verdict for each in found] == ["holds" if is_true else "cannot be true"]


def test_an_accept_length_without_the_bonus_is_recognised(served):
    report = served(3, (128, 129))
    drafts_only = report.figures["Spec Decode Accept Length"] - 1
    assert drafts_only > 1
    bare = replace(report, figures=report.figures | {"Spec Decode Accept Length": drafts_only})
    assert any("3 drafts do without the bonus token" in finding.says for finding in lint(bare))


@pytest.mark.parametrize(("length", "rate"), [(1e308, 1e-298), (2.0, 5e-324)])
def test_a_number_of_drafts_beyond_any_float_cannot_be_true(length, rate):
    report = Report("a run", {"Spec Decode Accept Length": length, "Spec Decode Accept Rate (%)": rate})
    (finding,) = (each for each in lint(report) if each.verdict == "cannot be true")
    assert "no number of drafts gives both" in finding.says


def test_a_published_table_contradicts_its_command():
    reports = read_reports(VLLM_41162)
    assert len(reports) == 45
    assert set().union(*map(wrong, reports)) == set()
    assert all(derived(report)["drafts"] == pytest.approx(3, rel=1e-3) for report in reports)
    fixed = [report for report in reports if not report.label.startswith("GPT-OSS")]
    assert len(fixed) == 33
    for report in fixed:
        figures = derived(report)
        assert figures["output"] == pytest.approx(128, rel=1e-4)
        assert figures["by times"] == pytest.approx(128, rel=1e-4)
        assert figures["under way"] <= report.concurrency * 1.001
        assert wrong(report, Stated(output_tokens=1536)) == {"E2E = TTFT + (L - 1) · TPOT"}
        assert wrong(report, Stated(128, 3)) == set()
    others = [derived(report)["output"] for report in reports if report not in fixed]
    assert 119 < min(others) < max(others) < 127


def test_a_report_without_anything_to_check_fails(command, tmp_path):
    (tmp_path / "one.csv").write_text("metric,value\nMean TTFT (ms),12\n")
    done = command("lint-report", str(tmp_path / "one.csv"))
    assert done.status == 2
    assert done.err.startswith("specsim: file is ")


def test_the_command_fails_where_something_cannot_be_true(command, tmp_path):
    right = command("lint-report", str(VLLM_41162))
    assert right.status == 0
    assert "128.00" in right.out
    assert "cannot be true" not in right.out
    options = ["--num-drafts", "5", "--json", str(tmp_path / "found.json")]
    wrong = command("lint-report", str(VLLM_41162), *options)
    assert wrong.status == 1
    assert "5 drafts a round as stated" in wrong.out.replace("\n", " ")
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert sum(each["verdict"] == "cannot be true" for each in found) == 45


@pytest.mark.parametrize(
    ("text", "name", "place"),
    [
        ("a,b\n1,2\n", "file", ""),
        ("metric,value\nSpeed,1\n", "metric", "line 2"),
        ("metric,value\nMean ITL (ms),-1\n", "value", "line 2"),
        ("metric,value\nMean ITL (ms),fast\n", "value", "line 2"),
        ("metric,value\nMean ITL (ms),1\nMean ITL (ms),2\n", "metric", "line 3"),
        ("concurrency,metric,value\nmany,Mean ITL (ms),1\n", "concurrency", "line 2"),
        ("concurrency,metric,value\n1.5,Mean ITL (ms),1\n", "concurrency", "line 2"),
        ("metric,value,value\nMean ITL (ms),1,2\n", "file", ""),
        ("metric,value,\nMean ITL (ms),1,5\n", "file", "line 2"),
        ("metric,value,run\nMean ITL (ms),1\n", "file", "line 2"),
        ("metric,value\nMean ITL (ms),1,extra\n", "file", "line 2"),
        ("metric,value\n\nMean ITL (ms),fast\n", "value", "line 3"),
        (f"metric,value\nMean ITL (ms),{'1' * 200_000}\n", "file", ""),
        ("metric,value\n", "file", ""),
    ],
)
def test_a_foreign_table_is_refused_by_field(text, name, place, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(InputError, check=lambda error: error.name == name and place in str(error)):
        read_reports(path)


@pytest.mark.parametrize(("count", "is_shown"), [(SHOWN, True), (SHOWN + 1, False)])
def test_findings_of_more_reports_are_counted_only(served, count, is_shown, capsys):
    reports = [replace(served(3, (128, 129)), label=f"run {number}") for number in range(count)]
    show(reports, [finding for report in reports for finding in lint(report)], stdout_console())
    assert ("findings" in capsys.readouterr().out) == is_shown


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_a_table_may_end_as_anywhere(end, tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(end.join(("metric,value", "Mean ITL (ms),5", "")).encode())
    assert read_reports(path) == [Report("the run", {"Mean ITL (ms)": 5.0})]
