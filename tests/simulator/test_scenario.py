import json

import pytest

from specsim.cli.main import main
from specsim.simulator.lint import lint
from specsim.simulator.report import Report

SMALL = ["simulate", "--requests", "40", "--prompt-tokens", "60", "--output-tokens", "30", "--concurrency", "8"]


def run(arguments, status=0):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == status


@pytest.fixture
def made(tmp_path):
    def simulate(*more):
        path = tmp_path / "result.json"
        run([*SMALL, *more, "--json", str(path)])
        return json.loads(path.read_text())

    return simulate


def test_a_workload_is_served_in_both_ways_and_its_report_holds(made, capsys):
    result = made()
    assert list(result["runs"]) == ["no drafts", "drafts"]
    for metrics in result["runs"].values():
        seconds = metrics.pop("seconds")
        report = Report("simulated", metrics, 8, seconds, 40, 40 * 60, 40 * 30)
        known = Report("simulated", {name: value for name, value in metrics.items() if value is not None}, *_of(report))
        assert [finding for finding in lint(known) if finding.verdict == "cannot be true"] == []
        assert metrics["Output Throughput (tok/s)"] * seconds == pytest.approx(40 * 30)
    out = capsys.readouterr().out
    assert "simulated, not measured" in out
    assert "pays above" in out


def test_only_what_simulating_took_differs_from_run_to_run(made, capsys):
    first, again = made(), made()
    took = first.pop("simulation_took")
    assert list(took) == list(first["runs"])
    assert all(0 < each["core_seconds"] < 60 and each["seconds"] > 0 for each in took.values())
    assert took != again.pop("simulation_took")
    assert first == again
    assert "simulated 40 requests in " in capsys.readouterr().out


def _of(report):
    return report.concurrency, report.duration, report.completed, report.input_tokens, report.output_tokens


def test_drafts_that_are_all_accepted_pay_what_a_round_says(made):
    alone = ("--requests", "2", "--concurrency", "1", "--prompt-tokens", "1", "--output-tokens", "401")
    result = made("--accept-rates", "1,1,1", *alone)
    ratio = result["runs"]["no drafts"]["Mean TPOT (ms)"] / result["runs"]["drafts"]["Mean TPOT (ms)"]
    assert ratio == pytest.approx(4 / 1.16, rel=0.01)  # 1.16 plain steps for four tokens


def test_settings_reach_the_simulated_server(made):
    base = made()["runs"]["drafts"]
    slow = made("--efficiency", "bandwidth=0.4")["runs"]["drafts"]
    assert slow["Mean TPOT (ms)"] > 1.5 * base["Mean TPOT (ms)"]
    assert made("--hardware", "h200")["runs"]["drafts"]["Mean TPOT (ms)"] < base["Mean TPOT (ms)"]
    host = made("--schedule", "sync", "--efficiency", "host=0.1")["runs"]["drafts"]
    assert host["Mean ITL (ms)"] > 100
    assert made("--seed", "1")["runs"]["drafts"] != base
    assert made()["runs"]["drafts"] == base
    assert list(made("--drafter", "none")["runs"]) == ["no drafts"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hardware", "TPU"], "hardware is 'TPU'; allowed: A100"),
        (["--model", "gpt-9"], "model is 'gpt-9'; allowed: glm"),
        (["--drafter", "medusa"], "drafter is 'medusa'; allowed: eagle or eagle3 or mtp or none"),
        (["--accept-rates", "0.5,0.7,0.1"], "accept_rates is '0.5,0.7,0.1'; allowed: unconditional rates"),
        (["--accept-rates", "1.5,0.7,0.1"], "accept_rates is '1.5,0.7,0.1'; allowed: a number from 0 to 1"),
        (["--accept-rates", "high"], "accept_rates is 'high'; allowed: numbers"),
        (["--num-steps", "5", "--num-draft-tokens", "6"], "a rate for each of the 5 steps"),
        (["--concurrency", "0"], "concurrency is 0; allowed: an integer from 1"),
        (["--rate", "3"], "rate is '3.0'; allowed: one of it and concurrency"),
        (["--drafter", "none", "--num-steps", "5"], "num_steps is '5'; allowed: 3, the default, with drafter none"),
        (["--drafter", "none", "--topk", "0"], "topk is '0'; allowed: 1, the default, with drafter none"),
        (["--drafter", "none", "--accept-rates", "foo"], "accept_rates is 'foo'; allowed: 0.73,0.52,0.35, the default"),
        (["--drafter", "none", "--plot", "p.png"], "plot is 'p.png'; allowed: none without drafts"),
        (["--efficiency", "speed=2"], "efficiency is 'speed=2'; allowed: NAME=NUMBER with one of bandwidth"),
        (["--efficiency", "bandwidth=2"], "bandwidth is 2.0; allowed: a number above 0 and at most 1"),
        (["--memory-share", "0.1"], "tensor_parallel is 1; allowed: GPUs that hold llama-3.1-8b and some KV"),
        (["--prompt-tokens", "10000000"], "and enough KV slots: at least 10000032, which request 0 needs"),
        (["--draft-vocab", "0"], "draft_vocab is 0; allowed: an integer of at least 1"),
        (["--requests", "0"], ": requests is 0; allowed: an integer from 1"),
        (["--seed", "-1"], "seed is -1; allowed: an integer from 0 to 2^64 - 1"),
        (["--tensor-parallel", "3"], "tensor_parallel is 3; allowed: 1, 2, 4, 8, 16, 32: "),
        (["--tensor-parallel", "0"], "tensor_parallel is 0; allowed: 1, 2, 4"),
        (["--table", "vllm_20780"], "requests is '40'; allowed: 1000, the default, with a table"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(arguments, says, capsys):
    run([*SMALL, *arguments], 2)
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_arrivals_by_rate_and_by_file(made, tmp_path):
    path = tmp_path / "requests.jsonl"
    line = {"arrival_s": 0.0, "prompt_tokens": 20, "output_tokens": 5}
    path.write_text("\n".join(json.dumps(line | {"arrival_s": float(at)}) for at in range(3)))
    arguments = ["simulate", "--workload", str(path), "--json", str(tmp_path / "r.json")]
    run(arguments)
    metrics = json.loads((tmp_path / "r.json").read_text())["runs"]["drafts"]
    assert 2 < metrics["seconds"] < 2.5
    run(["simulate", "--requests", "50", "--rate", "1000", "--output-tokens", "3", "--json", str(tmp_path / "s.json")])
    assert json.loads((tmp_path / "s.json").read_text())["runs"]["drafts"]["seconds"] < 2


def test_a_file_of_requests_says_all_of_them(tmp_path, capsys):
    run(["simulate", "--workload", str(tmp_path / "requests.jsonl"), "--output-tokens", "5"], 2)
    assert "output_tokens is '5'; allowed: 128, the default, with a workload" in capsys.readouterr().err


def test_a_picture_is_written_beside_the_table(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speedup.png"
    run([*SMALL, "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
