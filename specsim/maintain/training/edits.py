"""Prompts that ask for an edit: a held-out excerpt, then its beginning again with an identifier renamed.

The continuation repeats most of the excerpt, as an answer that edits a given file does. No model is looked at.
"""

import json
import re
from collections import Counter
from keyword import kwlist
from pathlib import Path

from specsim.models.shipped import load_prompts

IDENTIFIER = re.compile(r"\b(?!__)[A-Za-z_]\w{2,}\b(?=\(|\[| = |=|\.\w)")
NOT_RENAMED = frozenset([*kwlist, "self", "cls"])
HEADING = "# The same code, with {old} renamed to {new}:"


def make_edits(prompts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Make an edit of each prompt that has an identifier to rename in what is to be written.

    The identifier is the most frequent word that is called, indexed, assigned or has an attribute somewhere; ties: the
    first one. The repeated beginning has the fewest whole lines that are a quarter of the excerpt and contain the
    identifier. At least half of the characters have to follow, and the identifier has to be in them.
    """
    texts = [_edit(prompt["text"]) for prompt in prompts]
    return [{**prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True) if text is not None]


def write_edits(folder: Path) -> None:
    """Write edits.jsonl next to the prompts of a pair."""
    lines = [json.dumps(edit, ensure_ascii=False) + "\n" for edit in make_edits(load_prompts(folder))]
    (folder / "edits.jsonl").write_text("".join(lines), encoding="utf-8")


def _edit(text: str) -> str | None:
    names = set(IDENTIFIER.findall(text)) - NOT_RENAMED
    words = Counter(word for word in re.findall(r"\w+", text) if word in names)  # in the order of the text
    if not words:
        return None
    old = max(words, key=lambda word: words[word])
    new = f"new_{old.lstrip('_')}"
    lines = text.splitlines()
    renamed = [re.sub(rf"\b{old}\b", new, line) for line in lines]
    changed = [index for index, (line, other) in enumerate(zip(lines, renamed, strict=True)) if line != other]
    shown = max(changed[0] + 1, -(-len(lines) // 4))
    rest = "\n".join(lines[shown:])
    if changed[-1] < shown or 2 * len(rest) < len(text):
        return None
    return "\n".join([*lines, "", "", HEADING.format(old=old, new=new), *renamed[:shown]]).rstrip()
