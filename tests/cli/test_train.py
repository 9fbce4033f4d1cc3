"""specsim train writes a drafter that the other commands load, continues, and refuses bad input."""

import json

import pytest

from specsim.models.load import load
from specsim.models.shipped import TINY

FEW = ("--num-steps", "2", "--num-windows", "1", "--window", "16")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    lines = [{"text": f"def f{number}(x):\n    return x + {number}\n" * 3} for number in range(16)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trained_drafter_is_loaded(call, tmp_path, text):
    out = tmp_path / "block"
    words = ("--drafter", "dflash", "--data", str(text), "--num-drafts", "4")
    status, printed, _ = call("train", "--out", str(out), *words, *FEW)
    assert status == 0
    assert "accept length" in printed
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    pair = load(TINY / "target", out, drafter="dflash")
    assert pair.checkpoint.config.kind == "dflash"


def test_continuations_are_learned_from(call, tmp_path):
    words = ("--continuations", "2", "--loss", "lk", "--intermediate-size", "32", "--draft-vocab-size", "64")
    assert call("train", "--out", str(tmp_path / "head"), *FEW, *words)[0] == 0
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (config["intermediate_size"], config["draft_vocab_size"]) == (32, 64)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--drafter", "ngram"), "drafter"),
        (("--loss", "l2"), "loss"),
        (("--drafter", "p-eagle", "--position-weights", "d-pace"), "position_weights"),
        (("--window", "3"), "window"),
        (("--continuations", "-1"), "continuations"),
        (("--intermediate-size", "0"), "intermediate_size"),
        (("--seed", "-1"), "seed"),
        (("--target", "nowhere/at/all"), "target"),
        (("--data", "missing.txt"), "data"),
    ],
)
def test_bad_input_is_one_sentence(call, assert_one_sentence, tmp_path, words, name):
    assert_one_sentence(call("train", "--out", str(tmp_path / "head"), *words), name)
    assert not (tmp_path / "head" / "config.json").exists()


def test_a_drafter_is_not_overwritten(call, assert_one_sentence, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert_one_sentence(call("train", "--out", str(tmp_path), *FEW), "out")
    assert (tmp_path / "config.json").read_text() == "{}"
