"""specsim accept --target: records, baselines and pictures; the commands that read a record."""

import json
import re
from pathlib import Path

import pytest

from specsim import load
from specsim.acceptance.files import read_record

pytestmark = pytest.mark.usefixtures("shipped")
PAIR = ("accept", "--target", "tiny", "--drafter", "eagle3", "--max-new-tokens", "12", "--num-steps", "2")


@pytest.fixture
def record(call, tmp_path) -> str:
    path = tmp_path / "record.json"
    assert call(*PAIR, "--json", str(path))[0] == 0
    return str(path)


def changed(path: str, tmp_path, **fields) -> str:
    """A copy of a record with other values."""
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(Path(path).read_text()) | fields))
    return str(other)


def test_a_pair_is_recorded(call, record, tmp_path):
    found = read_record(record)
    assert (found.num_steps, found.topk, len(found.counts), found.is_by_request) == (2, 1, 3, True)
    value = json.loads(Path(record).read_text())
    assert value["source"] == "specsim accept --target tiny --drafter eagle3 --max-new-tokens 12 --num-steps 2"
    status, out, _ = call(*PAIR)
    assert status == 0
    assert f"accept length  {found.accept_length:.3f} tokens a round, bonus included" in out
    assert "bootstrap over 3" in out


def test_a_field_of_the_head_can_be_given(call, tmp_path):
    field = "--draft-field", "norm_before_residual=true"
    assert call(*PAIR, *field, "--json", str(tmp_path / "other.json"))[0] == 0
    assert " ".join(field) in json.loads((tmp_path / "other.json").read_text())["source"]
    assert "draft_fields is 'no'" in call(*PAIR, "--draft-field", "no=1")[2]


def test_prompts_of_a_file_are_measured(call, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "def add(a, b):"}\n{"prompt": "class Tree:"}\n')
    path = tmp_path / "out.json"
    assert call(*PAIR, "--prompts", str(tmp_path / "p.jsonl"), "--json", str(path))[0] == 0
    assert len(read_record(path).counts) == 2


def test_a_drafter_may_be_a_folder(call, tiny, record, tmp_path):
    path = tmp_path / "own.json"
    words = [str(tiny / "eagle3") if word == "eagle3" else word for word in PAIR]
    assert call(*words, "--json", str(path))[0] == 0
    assert read_record(path).counts == read_record(record).counts
    words[words.index("--drafter")] = "--draft"
    assert call(*words)[0] == 0


def test_the_same_run_is_no_regression(call, record):
    status, out, _ = call(*PAIR, "--baseline", record)
    assert status == 0
    assert "No regression: accept length" in out


def test_a_regression_exits_with_status_1(call, record, tmp_path):
    better = [{"rounds": 9, "accepted_drafts": 18, "by_position": [9, 9], "reached": [9, 9]}] * 3
    positions = [{"position": position, "unconditional": 1.0} for position in (1, 2)]
    figures = {"counts": better, "accept_length": 3.0, "positions": positions, "interval": None}
    status, out, _ = call(*PAIR, "--baseline", changed(record, tmp_path, **figures))
    assert status == 1
    assert "Regression: accept length" in out
    status, out, _ = call(*PAIR, "--tolerance", "0.9", "--baseline", changed(record, tmp_path, **figures))
    assert status == 0
    status, _, said = call(*PAIR, "--baseline", changed(record, tmp_path, accept_length=1e308))
    assert status == 2
    assert "baseline is" in said


def test_a_picture_is_written(call, tmp_path):
    pytest.importorskip("matplotlib")
    assert call(*PAIR, "--plot", str(tmp_path / "p.png"))[0] == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_is_predicted_from(call, record, tmp_path):
    path = tmp_path / "out.json"
    status, out, _ = call("predict", "--acceptance", record, "--json", str(path))
    assert status == 0
    rows = json.loads(path.read_text())["rows"]
    lengths = [row["accept_length"] for row in rows]
    assert lengths == sorted(lengths)
    (own,) = [row for row in rows if row["is_measured"]]
    assert own["accept_length"] == read_record(record).accept_length
    assert "chain of 8" in out
    assert "90% by errors on published series" in " ".join(out.split())


def test_accept_lengths_are_predicted_from(call):
    status, out, _ = call("predict", "--accept-lengths", "1.8,2.4,2.8")
    assert status == 0
    assert [line.split()[3] for line in out.splitlines() if line.startswith("chain of")][:3] == [
        "1.800",
        "2.400",
        "2.800",
    ]


def test_a_record_is_checked_by_lint_report(call, record, tmp_path):
    status, out, _ = call("lint-report", record)
    assert status == 0
    assert "accept length = 1 + Σ rates by position  holds" in out
    status, out, _ = call("lint-report", changed(record, tmp_path, reported_length=2.9))
    assert status == 1
    assert "cannot be true" in out


@pytest.mark.parametrize(("length", "status"), [(1.25, 0), (1.5, 1)])
def test_the_accept_length_of_vllm_follows_from_its_counts(call, tmp_path, length, status):
    metrics = {"acceptance_histogram": [6, 2, 0], "num_spec_steps": 8, "num_draft_tokens": 16, "num_spec_tokens": 2}
    response = {"metrics": {"speculative_decoding": metrics | {"mean_acceptance_length": length}}}
    (tmp_path / "responses.jsonl").write_text(json.dumps(response) + "\n" + json.dumps(response) + "\n")
    assert call("lint-report", str(tmp_path / "responses.jsonl"))[0] == status


def test_an_accept_length_beyond_the_drafts_cannot_be_true(call, tmp_path):
    (tmp_path / "info.json").write_text(
        json.dumps({"speculative_num_steps": 1, "internal_states": [{"avg_spec_accept_length": 2.4}]})
    )
    status, out, _ = call("lint-report", str(tmp_path / "info.json"))
    assert status == 1
    assert "accept length 2.4 with 1 drafts a round: at most 2" in out


@pytest.mark.parametrize("option", [("--acceptance", "{record}"), ("--accept-lengths", "1.6,2.0")])
def test_a_server_is_simulated_with_measured_acceptance(call, record, option):
    load = ("--requests", "8", "--prompt-tokens", "20", "--output-tokens", "10")
    words = [word.format(record=record) for word in option]
    status, out, _ = call("simulate", *load, "--num-steps", "4", *words)
    assert status == 0
    assert "90% by errors on published series" in " ".join(out.split())


def test_a_sweep_takes_accept_lengths(call, tmp_path):
    load = ("--requests", "4", "--prompt-tokens", "20", "--output-tokens", "4", "--jobs", "1")
    out, file = tmp_path / "cells.sqlite", tmp_path / "out.json"
    words = ("--vary", "num_steps=2,5", "--accept-lengths", "1.6,2.0", "--json", str(file))
    status, printed, _ = call("sweep", "--out", str(out), *words, *load)
    assert status == 0
    assert "measured, from --accept-lengths" in " ".join(printed.split())
    assert [cell["error"] for cell in json.loads(file.read_text())["cells"]] == [None, None]


def test_the_cost_of_fewer_tokens_and_keys_is_shown(call, tmp_path):
    size = load(drafter="none").target.config.vocab_size
    (tmp_path / "list.txt").write_text("\n".join(map(str, range(0, size, 2))))
    words = ("--draft-vocab", str(tmp_path / "list.txt"), "--draft-window", "16", "--draft-first-columns", "2")
    file = tmp_path / "record.json"
    status, out, _ = call(*PAIR, "--json", str(file), *words)
    assert status == 0  # a regression is of a --baseline only
    text = " ".join(out.split())
    assert re.search(r"of tiny, eagle3, \d+ draft tokens, draft window 16", text)
    assert re.search(r"A draft reads [\d.]+% of the target's weights, [\d.]+% with all tokens.", text)
    assert re.search(r"accept length [\d.]+, the baseline's [\d.]+: ", text)
    assert {*words} <= {*json.loads(file.read_text())["source"].split()}


PREDICT = ("predict", "--acceptance", "{record}")
BAD = [
    (PAIR, "--prompts p.txt"),
    (PAIR, "--drafter ngram"),
    (PAIR, "--draft folder"),
    (PAIR, "--drafter none"),
    (PAIR, "--num-steps 0"),
    (PAIR, "--baseline nothing.json"),
    (PAIR, "--tolerance 0.1"),
    (PAIR, "--jobs 2"),
    (PAIR, "--batch 0"),
    (PAIR, "--plot p.pdf"),
    (PAIR, "--draft-vocab nothing.json"),
    (PAIR, "--draft-vocab-size 5"),
    (PAIR, "--draft-first-columns 2"),
    (PAIR, "--temperature -1"),
    (("accept",), "--num-steps 2"),  # which needs a target, as do the next
    (("accept",), "--baseline record.json"),
    (("accept",), "--prompts file.txt"),
    (("accept",), "--temperature 1"),
    (("accept",), "--impl fast"),
    (PREDICT, "--prompts 3"),  # a prediction from a record runs nothing
    (PREDICT, "--drafter eagle"),
    (PREDICT, "--accept-lengths 2"),
]


@pytest.mark.parametrize(("command", "option"), BAD)
def test_bad_input_is_one_sentence(call, request, command, option):
    record = request.getfixturevalue("record") if command is PREDICT else ""
    status, _, err = call(*(word.format(record=record) for word in command), *option.split())
    assert status == 2
    assert f"specsim: {option.split()[0][2:].replace('-', '_')} is " in err
