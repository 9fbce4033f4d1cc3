"""Plans: the best of all candidates, what each other costs, and flags that engines take."""

import json
import shlex
from dataclasses import replace
from functools import cache

import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator.acceptance import iid
from specsim.simulator.cell import Cell, chain_shares, read_shares
from specsim.simulator.option import Option
from specsim.simulator.plan import candidates, plan, sglang_flags, vllm_flags

SHARES = ((0.6, 0.15, 0.05), (0.55, 0.15, 0.05), (0.5, 0.15, 0.05))
CELL = Cell(requests=24, concurrency=8, prompt_tokens=100, output_tokens=60, shares=SHARES, max_running=128)


@cache
def planned(objective: str = "throughput"):
    return plan(CELL, objective)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_the_best_is_the_best_of_all(objective):
    found = planned(objective)
    figure = {"throughput": "Output Throughput (tok/s)", "latency": "Mean E2E Latency (ms)"}[objective]
    values = [each.metrics[figure] for each in found.candidates]
    assert values == sorted(values, reverse=objective == "throughput")
    assert {each.config for each in found.candidates} == set(candidates(CELL))
    assert found.best.regret == 0
    worst = found.candidates[-1]
    ratio = values[0] / values[-1] if objective == "throughput" else values[-1] / values[0]
    assert worst.regret == pytest.approx(ratio - 1)
    again = CELL.scenario.run(CELL.option(found.best.config)).metrics()
    assert again[figure] == values[0]


def test_candidates_lie_within_what_is_known():
    configs = candidates(CELL)
    assert configs[0].is_plain
    assert all(config.topk <= 3 and config.num_steps <= 3 for config in configs)
    assert any(config.topk > 1 for config in configs)
    assert all(config.topk == 1 for config in candidates(Cell()))


def test_drafts_pay_in_small_batches_and_not_in_large_ones():
    hard = replace(CELL, hardware="RTX-4090", shares=((0.3,), (0.2,)), max_running=1000)
    found = plan(hard, configs=[SpecConfig.plain(), SpecConfig(1, 1, 2), SpecConfig(1, 2, 3)])
    assert not found.by_batch[0].config.is_plain
    assert found.by_batch[0].speedup > 1.05
    assert found.crossover is not None
    assert all(each.config.is_plain == (each.batch >= found.crossover) for each in found.by_batch)


def test_speed_up_and_crossover_ignore_drafts_beyond_the_setting():
    scenario, config = CELL.scenario, SpecConfig(1, 2, 3)
    own, longer = (replace(scenario, option=Option(config, iid(0.6, drafts))) for drafts in (2, 5))
    assert longer.speedup(1) == own.speedup(1) < 3
    assert longer.crossover() == own.crossover() is not None


def test_flags_are_those_of_the_engines():
    tree, chain = SpecConfig(4, 3, 8), SpecConfig(1, 3, 4)
    words = shlex.split(sglang_flags(CELL, tree, "a/head"))
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags["--speculative-algorithm"] == "EAGLE3"
    assert flags["--speculative-draft-model-path"] == "a/head"
    assert (flags["--speculative-num-steps"], flags["--speculative-eagle-topk"]) == ("3", "4")
    assert flags["--speculative-num-draft-tokens"] == "8"
    words = shlex.split(vllm_flags(CELL, chain, "a/head"))
    expected = {"method": "eagle3", "model": "a/head", "num_speculative_tokens": 3}
    assert json.loads(words[words.index("--speculative-config") + 1]) == expected
    assert "speculative" not in sglang_flags(CELL, SpecConfig.plain()) + vllm_flags(CELL, SpecConfig.plain())
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("topk", 4)):
        vllm_flags(CELL, tree)


def test_a_plan_of_trees_has_no_flags_for_engines_of_chains():
    found = plan(CELL, configs=[SpecConfig(2, 2, 4)])
    assert found.best_chain is None
    value = found.to_json()
    assert value["vllm"] is None
    assert "--speculative-eagle-topk 2" in value["sglang"]


def test_a_plan_of_no_settings_is_refused():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("configs", [])):
        plan(CELL, configs=[])


def test_flags_are_quoted_for_a_shell():
    chain, name = SpecConfig(1, 3, 4), "my heads/it's one"
    words = shlex.split(sglang_flags(CELL, chain, name))
    assert words[words.index("--speculative-draft-model-path") + 1] == name
    words = shlex.split(vllm_flags(CELL, chain, name))
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == name


def test_shares_of_a_chain_give_its_rates_back():
    assert chain_shares((0.8, 0.4, 0.0, 0.0)) == ((0.8,), (0.5,), (0.0,), (0.0,))
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("accept_rates", (0.4, 0.5))):
        chain_shares((0.4, 0.5))


def test_a_share_larger_than_any_float_is_refused(tmp_path):
    path = tmp_path / "shares.json"
    path.write_text(json.dumps({"shares": [[10**400]]}))
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("accept", str(path))):
        read_shares(path)


LOAD = ["--requests", "12", "--concurrency", "4", "--prompt-tokens", "20-40", "--output-tokens", "30"]


def test_plan_prints_flags_and_writes_json(command, tmp_path):
    shares, out = tmp_path / "shares.json", tmp_path / "out.json"
    shares.write_text(json.dumps({"shares": SHARES}))
    assert read_shares(shares) == SHARES
    words = ["plan", *LOAD, "--accept", str(shares), "--draft", "my/head", "--policies", "--json", str(out)]
    ended = command(*words)
    assert ended.status == 0
    value = json.loads(out.read_text())
    assert value["sglang"] in ended.out
    assert value["vllm"] in ended.out
    assert "my/head" in value["sglang"]
    assert "my/head" in value["vllm"]
    assert value["candidates"][0]["regret"] == 0
    throughputs = {name: metrics["Output Throughput (tok/s)"] for name, metrics in value["policies"].items()}
    assert {"no drafts", "3 drafts", "goodput", "throughput", "moving average"} < set(throughputs)
    plain = next(each for each in value["candidates"] if each["config"]["num_steps"] == 0)
    assert throughputs["no drafts"] == pytest.approx(plain["metrics"]["Output Throughput (tok/s)"], rel=0.02)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--prompt-tokens", "much"], "prompt_tokens", "much"),
        (["--objective", "joy"], "objective", "joy"),
        (["--drafter", "oracle"], "drafter", "oracle"),
        (["--accept-rates", "0.5,0.9"], "accept_rates", (0.5, 0.9)),
        (["--accept", "/nowhere.json"], "accept", "/nowhere.json"),
        (["--rate", "3", "--concurrency", "5"], "rate", "3.0"),
        (["--rate", "-1"], "rate", -1.0),
        (["--memory-share", "0.1"], "tensor_parallel", 1),
    ],
)
def test_bad_input_is_one_sentence(command, words, name, value):
    assert command("plan", *words).refuses(name, value)
