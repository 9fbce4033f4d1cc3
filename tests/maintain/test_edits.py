"""The shipped edits are made from the shipped prompts, repeat them, and fit the shipped target."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from specsim.maintain.shipped_pair.prompts import make_edits, write_edits
from specsim.models.shipped import TINY, load_prompts

NEW_TOKENS = 64


def edit_of(*lines: str) -> str | None:
    edits = make_edits([{"id": "00", "text": "\n".join(lines)}])
    return edits[0]["text"] if edits else None


def test_shipped_edits_are_made_again(tmp_path: Path):
    shutil.copy(TINY / "prompts.jsonl", tmp_path)
    write_edits(tmp_path)
    assert (tmp_path / "edits.jsonl").read_bytes() == (TINY / "edits.jsonl").read_bytes()


def test_shipped_edits_repeat_their_prompt():
    prompts = {prompt["id"]: prompt for prompt in load_prompts()}
    edits = load_prompts(name="edits")
    assert len(edits) >= 24
    assert len({edit["id"] for edit in edits}) == len(edits)
    for edit in edits:
        excerpt = prompts[edit["id"]]["text"]
        assert {**edit, "text": excerpt} == prompts[edit["id"]]
        assert edit["text"].startswith(excerpt)
        old, new, beginning = re.fullmatch(
            r"\n\n\n# The same code, with (\w+) renamed to (\w+):\n(.*)", edit["text"][len(excerpt) :], re.DOTALL
        ).groups()
        assert re.search(rf"\b{new}\b", beginning)
        assert not re.search(rf"\b{old}\b", beginning)
        assert re.sub(rf"\b{old}\b", new, excerpt).startswith(beginning)


def test_shipped_edits_fit_the_target():
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    limit = json.loads((TINY / "target" / "config.json").read_text())["max_position_embeddings"]
    lengths = [len(tokenizer.encode(edit["text"]).ids) for edit in load_prompts(name="edits")]
    assert max(lengths) + NEW_TOKENS <= limit


def test_edit_renames_the_most_frequent_identifier():
    rest = ("b = a_long_name", "call(value, value)  # a comment about nothing in particular")
    assert edit_of("value = 1", "call(value)", *rest) == "\n".join(
        [
            "value = 1",
            "call(value)",
            *rest,
            "",
            "",
            "# The same code, with value renamed to new_value:",
            "new_value = 1",
        ]
    )


@pytest.mark.parametrize(
    "lines",
    [
        ("the the the", "a sentence of words, and again the words of a sentence"),  # no identifier
        ("self.x", "self.y", "self.z", "self.x", "self.y"),  # a name that stays
        ("once = 1", "y", "y", "y", "y"),  # nothing to rename in what follows
        ("y", "y", "y", "y", "last = 1", "last"),  # too little follows
    ],
)
def test_edit_needs_something_to_write(lines: tuple[str, ...]):
    assert edit_of(*lines) is None
