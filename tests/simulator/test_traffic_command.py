"""Plans from files: requests, GPUs and quantised models in; objectives and files for engines out."""

import json
import re

import pytest
import yaml
from jsonschema import Draft202012Validator

from specsim.simulator.engine_files import schema
from specsim.simulator.model import read_config

QUICK = ["--replicates", "1", "--accept-rates", "0.7,0.5", "--requests", "20"]
ROWS = [f"2023-11-16 18:15:{second:02d}.5000000,{200 + 10 * second},{20 + second}" for second in range(40)]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(ROWS) + "\n"
MESSAGES = [{"from": ("human", "gpt")[turn % 2], "value": "word " * 40} for turn in range(6)]
CHATS = [{"conversations": MESSAGES} for _ in range(8)]
GPU = {"name": "X1", "peak_flops": {"bfloat16": 5e14}, "bandwidth": 2e12, "memory": 8e10, "interconnect": 1e11}


def text(ended) -> str:
    assert ended.status == 0, ended.err
    return " ".join(ended.out.split())


@pytest.fixture
def file(tmp_path):
    def make(name: str, content: str) -> str:
        (tmp_path / name).write_text(content)
        return str(tmp_path / name)

    return make


def test_a_trace_becomes_a_plan_and_files_for_engines(command, file, tmp_path):
    """The path of the guide: a file of requests, a plan, a file that each engine reads."""
    names = {"sglang": "sglang.json", "vllm": "vllm.json", "tensorrt_llm": "trt.yaml"}
    words = [f"--{engine.replace('_', '-')}-file={tmp_path / name}" for engine, name in names.items()]
    out = tmp_path / "plan.json"
    slo = ["--slo", "ttft=60ms,tpot=20ms", "--attainment", "0.9", "--draft", "my/head", "--json", str(out)]
    said = text(command("plan", "--workload", file("azure.csv", AZURE), *QUICK, *slo, *words))
    assert "azure.csv at its own times: best for goodput" in said
    assert "40 requests (Azure); each run has 20 neighbours of them; on average" in said
    assert "objectives: TTFT ≤ 60 ms, TPOT ≤ 20 ms" in said
    assert "Highest rate with 90% of requests within them: " in said
    assert "Best chain by batch size, for engines that switch: 1 to " in said
    value = json.loads(out.read_text())
    assert value["objective"] == "goodput"
    assert value["highest_rates"]["best"]["rate"] >= value["highest_rates"]["plain"] > 1
    assert all(0 <= each["metrics"]["SLO Attainment (%)"] <= 100 for each in value["candidates"])
    written = {}
    for engine, name in names.items():
        assert str(tmp_path / name) in said
        written[engine] = yaml.safe_load((tmp_path / name).read_text())
        Draft202012Validator(schema(engine)).validate(json.loads(json.dumps(written[engine])))
    entries = [[each["low"], each["high"], each["config"]["num_steps"]] for each in value["chains"]]
    assert written["vllm"]["num_speculative_tokens_per_batch_size"] == entries
    assert written["vllm"]["model"] == "my/head"


def test_conversations_are_served_by_clients_with_their_prefixes(command, file, tmp_path):
    out = tmp_path / "plan.json"
    words = ["plan", "--workload", file("chats.json", json.dumps(CHATS)), *QUICK, "--concurrency", "4"]
    said = text(command(*words, "--json", str(out)))
    assert "chats.json, 4 clients: best for throughput" in said
    assert "24 requests of 8 conversations (conversations); each run has 20 neighbours of them" in said
    assert int(re.findall(r"([0-9]+)% of prompt tokens are in the prefix cache", said)[0]) > 30
    assert " 0% of prompt tokens are in the prefix cache" in text(command(*words, "--no-prefix-cache"))
    fast = json.loads(out.read_text())["candidates"]
    assert command(*words, "--no-prefix-cache", "--json", str(out)).status == 0
    slow = json.loads(out.read_text())["candidates"]
    ttft = [{each["config"]["num_steps"]: each["metrics"]["Mean TTFT (ms)"] for each in rows} for rows in (fast, slow)]
    assert ttft[0][0] < ttft[1][0]


def test_simulate_reads_the_same_files(command, file):
    said = text(command("simulate", "--workload", file("azure.csv", AZURE)))
    assert "Output Throughput (tok/s)" in said
    assert command("simulate", "--workload", file("chats.json", json.dumps(CHATS))).status == 0


def test_a_gpu_and_a_model_of_ones_own_are_planned_for(command, file, tmp_path):
    config = read_config("llama-3-8b")[1] | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    out = tmp_path / "plan.json"
    rows = {}
    for name in ("llama-3-8b", file("config.json", json.dumps(config))):
        words = ["--model", name, "--hardware", file("gpu.json", json.dumps(GPU)), "--json", str(out)]
        assert command("plan", *words, *QUICK, "--concurrency", "2").status == 0
        rows[name] = json.loads(out.read_text())["by_batch"][0]["plain_tokens_per_s"]
    half, quarter = rows.values()
    assert 1.5 * half < quarter < 4 * half


def test_shapes_of_loads_are_taken(command, tmp_path):
    out = tmp_path / "plan.json"
    words = ["--rate", "4", "--burstiness", "0.3", "--swing", "0.5", "--period", "60", "--prompt-tokens"]
    assert command("plan", *words, "lognormal:300:1.2", *QUICK, "--json", str(out)).status == 0
    cell = json.loads(out.read_text())["cell"]
    assert (cell["burstiness"], cell["swing"], cell["prompt_tokens"]) == (0.3, 0.5, "lognormal:300:1.2")


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--slo", "speed=1"], "slo", "speed=1"),
        (["--objective", "goodput"], "objective", "goodput"),
        (["--attainment", "0.5"], "attainment", 0.5),
        (["--slo", "ttft=1s", "--attainment", "2"], "attainment", 2.0),
        (["--burstiness", "2"], "burstiness", 2.0),
        (["--tokenizer", "/x"], "tokenizer", "/x"),
        (["--no-prefix-cache"], "prefix_cache", False),
        (["--workload", "/nowhere.csv"], "workload", "/nowhere.csv"),
        (["--workload", "FILE", "--prompt-tokens", "5"], "prompt_tokens", "5"),
        (["--workload", "FILE", "--concurrency", "5"], "concurrency", 5),
        (["--workload", "FILE", "--rate", "5", "--burstiness", "2"], "burstiness", 2.0),
        (["--workload", "FILE", "--rate", "5", "--concurrency", "5"], "rate", 5.0),
        (["--kv-cache-dtype", "fp3"], "kv_cache_dtype", "fp3"),
        (["--hardware", "/nowhere.json"], "hardware", "/nowhere.json"),
        (["--prompt-tokens", "lognormal:5"], "prompt_tokens", "lognormal:5"),
    ],
)
def test_bad_input_is_one_sentence(command, file, words, name, value):
    path = file("azure.csv", AZURE)
    assert command("plan", *QUICK, *(path if word == "FILE" else word for word in words)).refuses(name, value)


def test_nothing_is_written_where_one_file_is_impossible(command, tmp_path):
    """No drafts pay: no engine has a file, and none is half-written."""
    files = [f"--vllm-file={tmp_path / 'v.json'}", f"--sglang-file={tmp_path / 's.json'}"]
    words = ["--accept-rates", "0", "--replicates", "1", "--requests", "8", "--json", str(tmp_path / "o.json")]
    assert command("plan", *words, *files).refuses("num_steps", 0)
    assert list(tmp_path.iterdir()) == []


def test_objectives_that_no_rate_meets_are_said(command):
    words = ["plan", *QUICK, "--rate", "2", "--slo"]
    said = text(command(*words, "ttft=60ms,tpot=6ms"))
    assert "requests a second (plain decoding: none), found by bisection" in said
    assert "No setting has 99% of requests within them at any rate." in text(command(*words, "tpot=1ms"))
    assert "All 20 requests may come at once: too few" in text(command(*words, "ttft=1000s"))
