"""Prompts of a file: a text per line, or JSON Lines with texts or token ids."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specsim.core.errors import InputError, require
from specsim.core.files import read_text

_KEYS = ("prompt", "text", "prompt_ids", "turns", "question")
ALLOWED = (
    "a UTF-8 file with a prompt per line: a text, or in a .jsonl file a JSON string, a list of token ids, or an object "
    f"with {', '.join(_KEYS[:-1])} or {_KEYS[-1]}"
)

Prompt = str | list[int]


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file; of a conversation the first turn. InputError for a line that is none."""
    text = read_text(path, "prompts", ALLOWED)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    require(lines, "prompts", str(path), f"{ALLOWED} (it is empty)")
    if path.suffix.lower() != ".jsonl":
        return [line.rstrip("\r") for _, line in lines]
    prompts = [_prompt(line, f"{path}, line {number}") for number, line in lines]
    if len({type(prompt) for prompt in prompts}) > 1:
        raise InputError("prompts", str(path), "texts in all lines, or token ids in all of them")
    return prompts


def digest(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> str:
    """Name a list of prompts and the length of their outputs, so that equal ones are recognised."""
    value = json.dumps([list(map(list, prompts)), max_new_tokens])
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def _prompt(line: str, location: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError("prompts", location, ALLOWED) from error
    if isinstance(value, Mapping):
        value = next((value[key] for key in _KEYS if value.get(key)), None)
    if isinstance(value, list) and value and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise InputError("prompts", location, ALLOWED)
