"""Output and files of specsim plan."""

import json

import pytest

from specsim.simulator.cell import Cell
from specsim.simulator.efficiency import Efficiency

SHARES = ((0.6, 0.15, 0.05), (0.55, 0.15, 0.05), (0.5, 0.15, 0.05))
LOAD = ["--requests", "12", "--concurrency", "4", "--prompt-tokens", "20-40", "--output-tokens", "30"]
QUICK = [*LOAD, "--replicates", "1"]


def text(ended) -> str:
    assert ended.status == 0
    return " ".join(ended.out.split())


def test_plan_prints_flags_and_writes_json(command, tmp_path):
    shares, out = tmp_path / "shares.json", tmp_path / "out.json"
    shares.write_text(json.dumps({"shares": SHARES}))
    words = ["plan", *LOAD, "--acceptance", str(shares), "--draft", "my/head", "--policies", "--json", str(out)]
    ended = command(*words)
    assert ended.status == 0
    value = json.loads(out.read_text())
    assert value["sglang"] in ended.out
    assert value["vllm"] in ended.out
    assert "my/head" in value["sglang"]
    assert "my/head" in value["vllm"]
    assert value["replicates"] == 8
    assert value["candidates"][0]["regret"] < 0.03
    throughputs = {name: metrics["Output Throughput (tok/s)"] for name, metrics in value["policies"].items()}
    assert {"no drafts", "3 drafts", "goodput", "throughput", "moving average"} < set(throughputs)
    plain = next(each for each in value["candidates"] if each["config"]["num_steps"] == 0)
    assert throughputs["no drafts"] == pytest.approx(plain["metrics"]["Output Throughput (tok/s)"], rel=0.05)
    assert "(specsim), accept length 2.09" in text(ended)
    assert value["cell"]["shares"] == [list(row) for row in SHARES]


def test_the_off_switch_is_off_from_the_crossover_on(command, tmp_path):
    out = tmp_path / "out.json"
    for rates, limit in (("0", 0), ("0.1", None), ("0.9,0.8", None)):
        assert command("plan", *QUICK, "--accept-rates", rates, "--policies", "--json", str(out)).status == 0
        value = json.loads(out.read_text())
        most = 256 if value["crossover"] is None else value["crossover"] - 1
        assert limit in (None, most)
        assert f"off above {most}" in value["policies"]


def test_plan_prints_its_assumptions_and_defines_regret(command):
    said = text(command("plan", *QUICK))
    assert "Simulated with profile vllm-2026-dense: means of 1 × 12 requests" in said
    assert "Regret: additional time for the same tokens over that of the quickest setting." in said
    assert "Acceptance of the best draft at depth 1, 2, ...: 0.73 0.71 0.67 0.67 0.65 0.62 0.60 0.58, assumed" in said
    assert "published for Llama-3.1-8B with EAGLE-3 (vllm#32030, MT-Bench, T = 0; depths beyond 3 follow a line" in said
    assert "tree 4/5/16" in said
    for name in ("qwen3-8b", "Qwen/Qwen3-8B"):
        assert "0.65 0.62 0.50 0.51 0.47 0.42 0.38 0.34, assumed, as published for Qwen3-8B" in text(
            command("plan", *QUICK, "--model", name)
        )
    latency = text(command("plan", *QUICK, "--objective", "latency", "--replicates", "2"))
    assert "Regret: additional mean latency over the lowest of all, ± its 95% confidence interval." in latency


def test_a_best_setting_on_the_edge_is_called_so(command):
    edge = text(command("plan", *QUICK, "--accept-rates", "0.99,0.98"))
    assert "The best setting lies on the edge of what was tried (steps 2): more may be better." in edge
    assert "specsim sweep --out cells.sqlite --vary num_steps=2,3,4 by batch size" in edge
    assert "given by --accept-rates, which say nothing of second-best drafts: trees need --acceptance" in edge
    assert "on the edge" not in text(command("plan", *QUICK, "--accept-rates", "0.9,0.1,0.0"))


def test_accept_lengths_continue_with_an_interval(command, tmp_path):
    out = tmp_path / "out.json"
    said = text(command("plan", *QUICK, "--accept-lengths", "1.8,2.4,2.8", "--json", str(out)))
    shares = json.loads(out.read_text())["cell"]["shares"]
    assert [share for (share,) in shares[:3]] == pytest.approx([0.8, 0.75, 2 / 3])
    assert len(shares) == 8
    assert "measured, from --accept-lengths, accept length 2.80" in said
    assert "depths beyond 3 follow a line in logits of the conditional rates: accept length" in said


def test_a_length_of_a_tree_plans_trees(command, tmp_path):
    setting = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    file = tmp_path / "info.json"
    file.write_text(json.dumps(setting | {"internal_states": [{"avg_spec_accept_length": 2.9}]}))
    said = text(command("plan", *QUICK, "--acceptance", str(file)))
    assert "one probability of the best draft for all depths, which gives the tree's accept length" in said
    assert "tree 4/3/8" in said


def test_trees_that_no_engine_takes_are_named_and_left_out(command):
    words = ["--model", "glm-4.7-flash", *QUICK]
    said = text(command("plan", *words))
    assert "No trees were tried: engines take them for latent attention with --page-size 1 only." in said
    assert "tree " not in said
    assert "No trees were tried" not in text(command("plan", *words, "--page-size", "1"))


def test_both_tables_show_the_same_best_setting_of_the_load(command):
    lines = [line.split() for line in command("plan", *QUICK).out.splitlines()]
    (own,) = (words for words in lines if words[-3:] == ["simulated,", "as", "above"])
    first = lines[[words[:1] for words in lines].index(["setting"]) + 1]
    assert own[0] == "4"
    assert own[1:4] == [*first[:2], first[3]]  # setting and tok/s
    assert own[4] == first[4]  # over plain
    assert own[6:9:2] == [f"{bound:.2f}" for bound in sorted(map(float, own[6:9:2]))]
    assert float(own[6]) <= float(own[4]) <= float(own[8])  # range


def test_efficiency_and_schedules_are_taken(command, tmp_path):
    out = tmp_path / "out.json"
    words = ["--efficiency", "bandwidth=0.5", "--efficiency", "host=0.001", "--schedule", "sync"]
    said = text(command("plan", *QUICK, *words, "--plain-schedule", "overlap", "--json", str(out)))
    cell = Cell.from_json(json.loads(out.read_text())["cell"])
    assert (cell.efficiency.bandwidth, cell.efficiency.host) == (0.5, 0.001)
    assert (cell.schedule, cell.plain_schedule) == ("sync", "overlap")
    assert "Plain decoding runs under schedule overlap." in said
    assert "Simulated with profile vllm-2026-dense and bandwidth 0.5, host 0.001 as given: means of" in said


@pytest.mark.parametrize("value", ["default", "5.6e-06"])
def test_the_default_of_a_parameter_overrides_the_profile(command, tmp_path, value):
    out = tmp_path / "out.json"
    assert command("plan", *QUICK, "--efficiency", f"gap={value}", "--json", str(out)).status == 0
    cell = Cell.from_json(json.loads(out.read_text())["cell"])
    assert cell.kept == ("gap",)
    assert cell.scenario.efficiency.gap == Efficiency().gap
    own = cell.with_values(kept=()).scenario
    assert own.efficiency.gap == own.profile.server.efficiency.gap != Efficiency().gap
    assert "and gap 5.6e-06 as given" in text(command("plan", *QUICK, "--efficiency", f"gap={value}"))


def test_names_of_settings_are_never_wrapped(command):
    words = ["--slo", "ttft=1000ms,tpot=1000ms", "--attainment", "0.5", "--replicates", "2"]
    lines = command("plan", *LOAD, *words).out.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("setting"))
    rows = lines[start + 1 : lines.index("", start)]
    assert all(line.split()[0] in ("tree", "chain", "no", "and") for line in rows)
    assert any(line.startswith("tree ") and "/" in line.split()[1] for line in rows)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--prompt-tokens", "much"], "prompt_tokens", "much"),
        (["--objective", "joy"], "objective", "joy"),
        (["--drafter", "oracle"], "drafter", "oracle"),
        (["--accept-rates", "0.5,0.9"], "accept_rates", (0.5, 0.9)),
        (["--acceptance", "/nowhere.json"], "acceptance", "/nowhere.json"),
        (["--accept-lengths", "1.8,high"], "accept_lengths", "1.8,high"),
        (["--accept-lengths", "1.8,3.4"], "accept_lengths", (1.8, 3.4)),
        (["--accept-lengths", "1.8", "--accept-rates", "0.8"], "accept_rates", "0.8"),
        (["--rate", "3", "--concurrency", "5"], "rate", 3.0),
        (["--rate", "-1"], "rate", -1.0),
        (["--memory-share", "0.1"], "tensor_parallel", 1),
        (["--replicates", "0"], "replicates", 0),
        (["--efficiency", "speed=1"], "efficiency", "speed=1"),
        (["--efficiency", "bandwidth=fast"], "efficiency", "bandwidth=fast"),
        (["--plain-schedule", "never"], "plain_schedule", "never"),
        (["--policies", "--plain-schedule", "sync", "--replicates", "1", *LOAD], "plain_schedule", "sync"),
    ],
)
def test_bad_input_is_one_sentence(command, words, name, value):
    assert command("plan", *words).refuses(name, value)


@pytest.mark.parametrize("drafter", ["p-eagle", "dflash", "dspark"])
def test_plans_of_parallel_drafters_have_chains_only(command, tmp_path, drafter):
    out = tmp_path / "out.json"
    ended = command("plan", *QUICK, "--drafter", drafter, "--json", str(out))
    assert "No trees were tried: no released engine builds them over parallel drafts." in text(ended)
    value = json.loads(out.read_text())
    assert {each["config"]["topk"] for each in value["candidates"]} == {1}
    assert (value["sglang"] is None) is (drafter == "p-eagle")
    assert "speculative-config" in value["vllm"]
    sglang = tmp_path / "s.json"
    assert command("plan", *QUICK, "--drafter", drafter, "--sglang-file", str(sglang)).refuses("drafter", drafter)
    assert not sglang.exists()


@pytest.mark.parametrize("drafter", ["p-eagle", "dflash", "dspark"])
def test_parallel_drafters_are_simulated(command, tmp_path, drafter):
    out = tmp_path / "out.json"
    words = [*LOAD, "--drafter", drafter, "--json", str(out)]
    assert command("simulate", *words, "--adaptive", "moving-average").status == 0
    cells = tmp_path / "cells.sqlite"
    assert command("sweep", "--out", str(cells), *LOAD, "--drafter", drafter, "--vary", "num_steps=1,3").status == 0
    assert command("simulate", *LOAD, "--drafter", "medusa").refuses("drafter", "medusa")
