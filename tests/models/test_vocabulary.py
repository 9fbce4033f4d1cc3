"""Vocabularies of target and standalone drafter: equal ids, or their intersection."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from specsim.core.errors import InputError
from specsim.models.checkpoint.vocabulary import LazyTokenizer, check_vocabulary, vocabulary_map
from specsim.models.tiny_config import tiny_config


def tokenizer(folder: Path, *tokens: str) -> LazyTokenizer:
    folder.mkdir(exist_ok=True)
    ids = {token: index for index, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(ids, unk_token=tokens[0])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return LazyTokenizer(folder)


def check(tmp_path: Path, target_size: int = 48, draft_size: int = 48) -> None:
    target, draft = (tiny_config(vocab_size=size) for size in (target_size, draft_size))
    check_vocabulary(target, tmp_path / "target", draft, tmp_path / "draft")


def test_the_intersection_of_two_vocabularies(tmp_path: Path):
    """Leading spaces have a mark of their own in each kind of tokenizer."""
    target = tokenizer(tmp_path / "target", "?", "a", "Ġb", "Ġc", "d", "only")
    draft = tokenizer(tmp_path / "draft", "▁c", "d", "a", "▁b", "x")
    assert vocabulary_map(target, draft).tolist() == [[1, 2], [2, 3], [3, 0], [4, 1]]
    assert vocabulary_map(draft, target).tolist() == [[0, 3], [1, 4], [2, 1], [3, 2]]
    assert vocabulary_map(target, tokenizer(tmp_path / "other", "none", "of them")).shape == (0, 2)
    twice = tokenizer(tmp_path / "twice", " b", "Ġb", "Ġc", "d")  # two ids of one text: the first
    assert vocabulary_map(target, twice).tolist() == [[2, 0], [3, 2], [4, 3]]
    assert vocabulary_map(twice, target).tolist() == [[0, 2], [2, 3], [3, 4]]


def test_equal_vocabularies_pass(tmp_path: Path):
    for name in ("target", "draft"):
        tokenizer(tmp_path / name, "a", "b")
    check(tmp_path)
    tokenizer(tmp_path / "draft", "a", "b", "more")  # an id that the target's tokenizer does not have
    check(tmp_path)


def test_folders_without_tokenizers_are_compared_by_size(tmp_path: Path):
    check(tmp_path)
    with pytest.raises(InputError) as caught:
        check(tmp_path, draft_size=40)
    assert (caught.value.name, caught.value.value) == (f"the vocabulary of {tmp_path / 'draft'}", "40 tokens")
    assert "48 tokens" in caught.value.allowed


def test_equal_sizes_do_not_prove_equal_tokens(tmp_path: Path):
    tokenizer(tmp_path / "target", "a", "b", "c", "d", "e", "f")
    tokenizer(tmp_path / "draft", "a", "c", "b", "d", "f", "e")
    with pytest.raises(InputError) as caught:
        check(tmp_path)
    assert caught.value.value == "48 tokens; id 1 is 'c', not 'b'; id 2 is 'b', not 'c'; id 4 is 'f', not 'e'"
