"""Files of requests in simulate and sweep, as plan takes them."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.5000000,{200 + 10 * second},{20 + second}\n" for second in range(12)
)
MESSAGES = [{"from": ("human", "gpt")[turn % 2], "value": "word " * 40} for turn in range(6)]


def text(ended) -> str:
    assert ended.status == 0, ended.err
    return " ".join(ended.out.split())


@pytest.fixture
def azure(tmp_path) -> str:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return str(path)


@pytest.fixture
def chats(tmp_path) -> str:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([{"conversations": MESSAGES} for _ in range(4)]))
    return str(path)


@pytest.fixture
def tokenizer(tmp_path) -> str:
    made = Tokenizer(WordLevel({"?": 0, "word": 1}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def prompt_tokens(said: str) -> int:
    return int(said.split("on average ")[1].split()[0])


def test_a_tokenizer_counts_the_texts_of_a_simulation(command, chats, tokenizer):
    words = ["simulate", "--workload", chats, "--concurrency", "2"]
    assert "12 requests of 4 conversations (conversations)" in text(command(*words))
    counted = prompt_tokens(text(command(*words, "--tokenizer", tokenizer)))
    assert counted == 120  # 40, 120 and 200 words
    assert prompt_tokens(text(command(*words))) == 150  # 200 characters in 50 tokens a turn
    assert " 0% of prompt tokens are in the prefix cache" in text(command(*words, "--no-prefix-cache"))


def test_a_simulation_scales_the_times_of_a_file(command, azure, tmp_path):
    seconds = []
    for words in ([], ["--rate", "4"]):
        out = tmp_path / "result.json"
        text(command("simulate", "--workload", azure, *words, "--json", str(out)))
        seconds.append(json.loads(out.read_text())["runs"]["drafts"]["seconds"])
    assert 11 < seconds[0] < 12
    assert 11 / 4 < seconds[1] < 12 / 4


def test_a_sweep_serves_a_file_of_requests(command, azure, tmp_path):
    out = tmp_path / "result.json"
    words = ["sweep", "--out", str(tmp_path / "cells.sqlite"), "--workload", azure, "--jobs", "1"]
    said = text(command(*words, "--vary", "num_steps=0,2", "--json", str(out)))
    assert "12 requests (Azure); on average" in said
    value = json.loads(out.read_text())
    assert [cell["trace"] for cell in value["cells"]] == [azure] * 2
    latencies = {cell["num_steps"]: cell["Mean E2E Latency (ms)"] for cell in value["cells"]}
    assert value["best"][0]["num_steps"] == min(latencies, key=latencies.__getitem__)
    assert "2 cells: 0 simulated, 2 kept" in text(command(*words, "--vary", "num_steps=0,2"))
    assert "2 cells: 2 simulated" in text(command(*words, "--vary", "rate=1,4"))


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--vary", "num_steps=1", "--prompt-tokens", "5"], "prompt_tokens", "5"),
        (["--vary", "num_steps=1", "--concurrency", "5"], "concurrency", 5),
        (["--vary", "concurrency=1,2"], "concurrency", [1, 2]),
        (["--vary", "num_steps=1", "--burstiness", "2"], "burstiness", 2.0),
        (["--vary", "trace=a.csv"], "vary", "trace"),
    ],
)
def test_a_sweep_refuses_what_it_would_ignore(command, azure, tmp_path, words, name, value):
    given = ["sweep", "--out", str(tmp_path / "cells.sqlite"), "--workload", azure]
    assert command(*given, *words).refuses(name, value)
