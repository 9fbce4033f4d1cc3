"""Files of requests: traces, conversations and specsim's own lines, and errors that name file and line."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from specsim.core.errors import InputError
from specsim.simulator.request_file import RequestFile, Turn
from specsim.simulator.request_formats import read_requests

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:16:00.0000000,879,0
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
46,GPT-4,0,0,0,API log
118.5,GPT-4,417,276,693,Conversation log
"""
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "x" * 8},
            {"from": "gpt", "value": "y" * 5},
            {"from": "human", "value": "z" * 4},
            {"from": "gpt", "value": "y" * 12},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "alone"}]},
    {"id": "c", "messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]},
]


@pytest.fixture
def read(tmp_path):
    def read(text: str, name: str = "file", **settings: object) -> RequestFile:
        path = tmp_path / name
        path.write_text(text)
        return read_requests(path, **settings)

    return read


def alone(*lengths: tuple[int, int]) -> tuple[tuple[Turn, ...], ...]:
    return tuple((Turn(*each),) for each in lengths)


def test_an_azure_trace_is_sorted_and_starts_at_0(read):
    found = read(AZURE)
    assert (found.format, found.skipped, len(found)) == ("Azure", 1, 2)
    assert found.conversations == alone((374, 44), (396, 109))
    assert found.arrivals_s == pytest.approx([0, 4.314579], abs=1e-5)


def test_times_of_later_azure_traces_have_a_zone(read):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,5,6\n"
    found = read(text + "2024-05-10 02:00:01.009930+02:00,7,8\n")
    assert found.arrivals_s == pytest.approx([0, 1])


def test_a_burstgpt_trace_leaves_out_failed_requests(read):
    found = read(BURSTGPT)
    assert (found.format, found.skipped) == ("BurstGPT", 1)
    assert found.conversations == alone((472, 18), (1087, 230), (417, 276))
    assert found.arrivals_s.tolist() == [0, 40, 113.5]


def test_columns_of_sessions_are_no_obstacle(read):
    lines = BURSTGPT.splitlines()
    lines = ["Session ID," + lines[0], *(f"s{number}," + line for number, line in enumerate(lines[1:]))]
    assert read("\n".join(lines)).conversations == read(BURSTGPT, "other").conversations


def test_answers_of_conversations_are_requests_with_history(read):
    """4 characters a token, rounded up for each message."""
    found = read(json.dumps(SHAREGPT))
    assert found.conversations == ((Turn(2, 2, 0), Turn(5, 3, 4)), (Turn(2, 2, 0),))
    assert (found.skipped, found.arrivals_s) == (1, None)
    assert read(json.dumps(SHAREGPT), characters_per_token=2).conversations[1] == (Turn(4, 3, 0),)


def test_a_tokenizer_counts_the_texts(read, tmp_path):
    tokenizer = Tokenizer(WordLevel({"?": 0, "one": 1, "two": 2, "three": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert read(json.dumps(SHAREGPT), tokenizer=path).conversations[1] == (Turn(2, 1, 0),)
    with pytest.raises(InputError, check=lambda error: error.name == "tokenizer"):
        read("[]", "no", tokenizer=tmp_path / "none.json")


def test_files_of_the_same_size_and_time_are_read_again(read, tmp_path):
    for text, word in (("aa b", "aa"), ("a bb", "bb")):
        tokenizer = Tokenizer(WordLevel({"?": 0, word: 1}, unk_token="?"))
        tokenizer.pre_tokenizer = Whitespace() if word == "aa" else None
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "file").write_text(AZURE.replace("396", str(ord(text[1]) + 300)))
        for name in ("file", "tokenizer.json"):
            os.utime(tmp_path / name, (0, 0))
        found = read_requests(tmp_path / "file")
        assert found.conversations[1][0].prompt_tokens == ord(text[1]) + 300
        answer = read(json.dumps(SHAREGPT), "chats", tokenizer=tmp_path).conversations[1][0]
        assert answer.prompt_tokens == (2 if word == "aa" else 1)


def test_own_lines_have_lengths_and_times(read):
    lines = [{"arrival_s": 3, "prompt_tokens": 7, "output_tokens": 8}]
    lines += [{"arrival_s": 1.5, "prompt_tokens": 5, "output_tokens": 6}]
    found = read("\n".join(map(json.dumps, lines)))
    assert found.conversations == alone((5, 6), (7, 8))
    assert found.arrivals_s.tolist() == [0, 1.5]


def test_requests_of_run_have_prompts_and_turns(read):
    lines = [{"prompt_ids": [1, 2, 3], "max_new_tokens": 5}, {"id": 7, "prompt": "x" * 8}]
    lines += [{"prompt_ids": [4], "continues": 0, "max_new_tokens": 2}, {"prompt": "next", "continues": 7}]
    found = read("\n".join(map(json.dumps, lines)))
    assert found.conversations == ((Turn(3, 5, 0), Turn(9, 2, 8)), (Turn(2, 64, 0), Turn(67, 64, 66)))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (AZURE.replace(",109", ""), ", line 2"),
        (AZURE.replace("Context", "Prompt"), ""),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ""),
        ("[1, 2", ""),
        ('[{"id": 1}]', ", conversation 1"),
        ('[[{"from": "human", "value": "a"}, {"from": "gpt"}]]', ", conversation 1, message 2"),
        ("[[]]", ""),
        ('{"arrival_s": 0, "prompt_tokens": 5}', ", line 1"),
        ('{"prompt_ids": [1]}\n{"prompt_ids": []}', ", line 2"),
        ('{"prompt_ids": [1]}\n{"prompt_ids": [2], "continues": 9}', ", line 2"),
        ('{"prompt_ids": [1]}\n{"prompt_ids": [2], "continues": [0]}', ", line 2"),
        ('{"prompt_ids": [1], "id": {}}', ", line 1"),
        ('{"prompt_ids": [1], "max_new_tokens": 0}', ", line 1"),
        ("", ""),
        ("hello", ""),
    ],
)
def test_errors_name_file_and_line(read, tmp_path, text, place):
    expected = f"{tmp_path / 'file'}{place}"
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("workload", expected)):
        read(text)


@pytest.mark.parametrize(
    ("text", "field", "line"),
    [
        (AZURE.replace("396", "many"), "ContextTokens", 2),
        (AZURE.replace("44", "-1"), "GeneratedTokens", 3),
        (AZURE.replace("2023-11-16 18:16", "noon"), "TIMESTAMP", 4),
        (BURSTGPT.replace("45,ChatGPT", "later,ChatGPT"), "Timestamp", 3),
        (BURSTGPT.replace("1087", "1087.5"), "Request tokens", 3),
    ],
)
def test_a_bad_number_is_named_by_column(read, tmp_path, text, field, line):
    place = f"{tmp_path / 'file'}, line {line}"
    with pytest.raises(InputError, check=lambda error: error.name == field and place in str(error)):
        read(text)


def test_a_missing_file_is_named():
    with pytest.raises(InputError, check=lambda error: error.value == "/nowhere.csv"):
        read_requests(Path("/nowhere.csv"))
