import json

import pytest

from specsim.simulator.lint import lint
from specsim.simulator.measurement import Report

SMALL = ["simulate", "--requests", "40", "--prompt-tokens", "60", "--output-tokens", "30", "--concurrency", "8"]


@pytest.fixture
def made(command, tmp_path):
    def simulate(*more):
        path = tmp_path / "result.json"
        ended = command(*SMALL, *more, "--json", str(path))
        assert ended.status == 0
        return json.loads(path.read_text()) | {"printed": ended.out}

    return simulate


def test_a_workload_is_served_with_and_without_drafts(made):
    result = made()
    assert list(result["runs"]) == ["no drafts", "drafts"]
    for metrics in result["runs"].values():
        seconds = metrics.pop("seconds")
        report = Report("simulated", metrics, 8, seconds, 40, 40 * 60, 40 * 30)
        known = Report("simulated", {name: value for name, value in metrics.items() if value is not None}, *_of(report))
        assert [finding for finding in lint(known) if finding.verdict == "cannot be true"] == []
        assert metrics["Output Throughput (tok/s)"] * seconds == pytest.approx(40 * 30)
    assert "simulated with profile vllm-2026-dense" in " ".join(result["printed"].split())
    assert "break-even" in result["printed"]


def test_only_the_time_of_simulating_differs_between_runs(made):
    first, again = made(), made()
    assert "simulated 40 requests in " in first.pop("printed")
    again.pop("printed")
    took = first.pop("simulation_took")
    assert list(took) == list(first["runs"])
    assert all(0 < each["core_seconds"] < 60 and each["seconds"] > 0 for each in took.values())
    assert took != again.pop("simulation_took")
    assert first == again


def _of(report):
    return report.concurrency, report.duration, report.completed, report.input_tokens, report.output_tokens


def test_drafts_that_are_all_accepted_gain_as_a_round_predicts(made):
    alone = ("--requests", "2", "--concurrency", "1", "--prompt-tokens", "1", "--output-tokens", "401")
    result = made("--accept-rates", "1,1,1", *alone)
    ratio = result["runs"]["no drafts"]["Mean TPOT (ms)"] / result["runs"]["drafts"]["Mean TPOT (ms)"]
    assert ratio == pytest.approx(4 / 1.183, rel=0.01)  # 1.183 plain steps for four tokens


def test_settings_reach_the_simulated_server(made):
    base = made()["runs"]["drafts"]
    slow = made("--efficiency", "bandwidth=0.4")["runs"]["drafts"]
    assert slow["Mean TPOT (ms)"] > 1.5 * base["Mean TPOT (ms)"]
    assert made("--hardware", "h200")["runs"]["drafts"]["Mean TPOT (ms)"] < base["Mean TPOT (ms)"]
    host = made("--schedule", "sync", "--efficiency", "host=0.1")["runs"]["drafts"]
    assert host["Mean ITL (ms)"] > 100
    plain = made("--plain-schedule", "sync", "--efficiency", "host=0.1")["runs"]
    assert plain["no drafts"]["Mean ITL (ms)"] > 100
    assert plain["drafts"] == made("--efficiency", "host=0.1")["runs"]["drafts"]
    assert made("--seed", "1")["runs"]["drafts"] != base
    assert made()["runs"]["drafts"] == base
    assert list(made("--drafter", "none")["runs"]) == ["no drafts"]


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--hardware", "TPU"], "hardware", "TPU"),
        (["--model", "gpt-9"], "model", "gpt-9"),
        (["--drafter", "medusa"], "drafter", "medusa"),
        (["--accept-rates", "0.5,0.7,0.1"], "accept_rates", "0.5,0.7,0.1"),
        (["--accept-rates", "1.5,0.7,0.1"], "accept_rates", "1.5,0.7,0.1"),
        (["--accept-rates", "high"], "accept_rates", "high"),
        (["--num-steps", "5", "--num-draft-tokens", "6"], "num_steps", 5),
        (["--num-steps", "3", "--accept-rates", "0.5,0.4"], "accept_rates", "0.5,0.4"),
        (["--plain-schedule", "never"], "plain_schedule", "never"),
        (["--schedule", "never"], "schedule", "never"),
        (["--concurrency", "0"], "concurrency", 0),
        (["--rate", "3"], "rate", 3.0),
        (["--drafter", "none", "--num-steps", "5"], "num_steps", 5),
        (["--drafter", "none", "--topk", "0"], "topk", 0),
        (["--drafter", "none", "--accept-rates", "foo"], "accept_rates", "foo"),
        (["--drafter", "none", "--plot", "p.png"], "plot", "p.png"),
        (["--efficiency", "speed=2"], "efficiency", "speed=2"),
        (["--efficiency", "bandwidth=2"], "bandwidth", 2.0),
        (["--memory-share", "0.1"], "tensor_parallel", 1),
        (["--draft-vocab", "0"], "draft_vocab", 0),
        (["--requests", "0"], "requests", 0),
        (["--seed", "-1"], "seed", -1),
        (["--tensor-parallel", "3"], "tensor_parallel", 3),
        (["--tensor-parallel", "0"], "tensor_parallel", 0),
        (["--table", "vllm_20780"], "requests", 40),
        (["--plot", "x.nosuchext"], "plot", "x.nosuchext"),
        (["--plot", "speedup"], "plot", "speedup"),
    ],
)
def test_impossible_servers_are_refused_in_one_sentence(command, words, name, value):
    assert command(*SMALL, *words).refuses(name, value)


def test_a_rate_at_which_time_stands_still_is_refused(command):
    load = ["simulate", "--requests", "40", "--output-tokens", "3"]
    for rate in (1e-300, 3e-8):
        assert command(*load, "--rate", str(rate)).refuses("rate", rate)
    assert command(*load, "--rate", "1e-7").status == 0


def test_a_picture_of_a_sweep_is_png_too(command, tmp_path):
    words = ["sweep", "--out", str(tmp_path / "cells.sqlite"), "--vary", "concurrency=1", "--plot", "cells.svg"]
    assert command(*words).refuses("plot", "cells.svg")


def test_too_few_slots_name_the_request_that_needs_more(command):
    ended = command(*SMALL, "--prompt-tokens", "10000000")
    assert ended.refuses("tensor_parallel", 1)
    assert "and enough KV slots: at least 10000032, which request 0 needs" in ended.err


def test_arrivals_by_rate_and_by_file(command, tmp_path):
    path = tmp_path / "requests.jsonl"
    line = {"arrival_s": 0.0, "prompt_tokens": 20, "output_tokens": 5}
    path.write_text("\n".join(json.dumps(line | {"arrival_s": float(at)}) for at in range(3)))
    command("simulate", "--workload", str(path), "--json", str(tmp_path / "r.json"))
    metrics = json.loads((tmp_path / "r.json").read_text())["runs"]["drafts"]
    assert 2 < metrics["seconds"] < 2.5
    load = ["--requests", "50", "--rate", "1000", "--output-tokens", "3"]
    command("simulate", *load, "--json", str(tmp_path / "s.json"))
    assert json.loads((tmp_path / "s.json").read_text())["runs"]["drafts"]["seconds"] < 2


def test_a_file_of_requests_excludes_options_of_requests(command, tmp_path):
    words = ["--workload", str(tmp_path / "requests.jsonl"), "--output-tokens", "5"]
    assert command("simulate", *words).refuses("output_tokens", "5")


def test_a_picture_is_written_with_the_table(command, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speedup.png"
    assert command(*SMALL, "--plot", str(path)).status == 0
    assert path.read_bytes().startswith(b"\x89PNG")
