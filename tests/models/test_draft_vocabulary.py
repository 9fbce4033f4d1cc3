"""Lists of draft tokens: forms of their files, counting, and a list of another tokenizer."""

import json
from pathlib import Path

import pytest
import torch

from specsim import DraftVocabulary, InputError, load
from specsim.models.shipped import TINY

TOKENIZER = load(drafter="none").tokenizer
TEXT = (TINY / "text.jsonl").read_text()[:4000]


def refused(name: str):
    return pytest.raises(InputError, check=lambda error: error.name == name)


@pytest.mark.parametrize("text", ["[7, 2, 40]", "7\n2\n40\n", "  [7,\n 2, 40]", '{"c": 40, "a": 7, "b": 2}'])
def test_forms_of_a_text(text: str, tmp_path: Path):
    (tmp_path / "list").write_text(text)
    vocabulary = DraftVocabulary.read(tmp_path / "list")
    assert vocabulary.token_ids == (2, 7, 40)
    assert vocabulary.tokens == (("b", "a", "c") if "{" in text else ())


@pytest.mark.parametrize("value", [[7, 2, 40], torch.tensor([7, 2, 40]), torch.tensor([[7, 2, 40]], dtype=torch.int32)])
def test_a_token_map_of_sglang(value: object, tmp_path: Path):
    torch.save(value, tmp_path / "freq.pt")
    assert DraftVocabulary.of(tmp_path / "freq.pt").token_ids == (2, 7, 40)


@pytest.mark.parametrize(
    "text", ["", "[]", "[1, true]", "[1.5]", "7 x", "[-1]", "[3, 3]", "{}", '{"a": "b"}', "[1", "9" * 5000]
)
def test_files_that_are_no_list(text: str, tmp_path: Path):
    (tmp_path / "list").write_text(text)
    with refused("draft_vocab"):
        DraftVocabulary.read(tmp_path / "list")


@pytest.mark.parametrize("value", [{"a": 1}, torch.tensor([1.5]), "text", None, [object]])
def test_tensors_that_are_no_list(value: object, tmp_path: Path):
    torch.save(value, tmp_path / "freq.pt")
    with refused("draft_vocab"):
        DraftVocabulary.read(tmp_path / "freq.pt")
    with refused("draft_vocab"):
        DraftVocabulary.read(tmp_path / "none.pt")


def test_the_most_frequent_tokens_are_counted():
    text = "b b b c c a"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    by_count = sorted(set(ids), key=lambda token: (-ids.count(token), token))
    vocabulary = DraftVocabulary.most_frequent(TOKENIZER, text, 2)
    assert vocabulary.token_ids == tuple(sorted(by_count[:2]))
    assert vocabulary.tokens == tuple(TOKENIZER.convert_ids_to_tokens(list(vocabulary.token_ids)))
    with refused("draft_vocab_size"):
        DraftVocabulary.most_frequent(TOKENIZER, text, len(by_count) + 1)


def test_a_list_of_another_tokenizer_is_noticed(tmp_path: Path):
    """The other vocabulary has the same size, and two of its tokens at each other's ids."""
    path = tmp_path / "list.json"
    DraftVocabulary.most_frequent(TOKENIZER, TEXT, 300).write(path)
    assert load(draft_vocab=path).checkpoint.config.draft_vocab_size <= 300
    tokens = json.loads(path.read_text())
    assert len(tokens) == 300
    first, second = list(tokens)[:2]
    path.write_text(json.dumps(tokens | {first: tokens[second], second: tokens[first]}))
    with refused("draft_vocab") as raised:
        load(draft_vocab=path)
    assert first in str(raised.value)
    assert second in str(raised.value)


def test_a_list_without_texts_is_not_written(tmp_path: Path):
    with refused("tokens"):
        DraftVocabulary((1, 2)).write(tmp_path / "list.json")
    assert not any(tmp_path.iterdir())
