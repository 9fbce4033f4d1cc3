"""Readers of request files: Azure and BurstGPT traces, ShareGPT conversations, and specsim's own lines of JSON."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import numpy as np

from specsim.core.errors import InputError, require
from specsim.core.files import parse_json, read_text
from specsim.core.limits import MOST_TOKENS
from specsim.core.table import Row, Table, read_table
from specsim.simulator.bounds import positive
from specsim.simulator.conversations import read_conversations, read_prompts
from specsim.simulator.request_file import RequestFile, Turn
from specsim.simulator.workload import parse_workload

CHARACTERS = 4.0  # per token of English text, a common rule; a tokenizer is better
Count = Callable[[str], int]  # tokens of a text
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_TOKENIZER = "a tokenizer.json, or a folder with one"
_FORMATS = (
    f"a CSV with columns {', '.join(_AZURE)} (Azure) or {', '.join(_BURSTGPT)} (BurstGPT), JSON of conversations "
    "(ShareGPT), or a JSON object a line (arrival_s, prompt_tokens, output_tokens; or requests of specsim run)"
)


def read_requests(
    path: Path | str, tokenizer: Path | str | None = None, characters_per_token: float = CHARACTERS
) -> RequestFile:
    """Read a file of requests in any of the formats, which its content tells.

    tokenizer: a tokenizer.json or a folder with one, for texts; without one a text has its number of characters over
    characters_per_token, rounded up. InputError names file and line.
    """
    text = read_text(Path(path), "workload", "a UTF-8 file that can be read")
    return _parsed(text, str(path), None if tokenizer is None else _tokenizer(Path(tokenizer)), characters_per_token)


def _tokenizer(path: Path) -> tuple[str, str]:
    """Read a tokenizer.json, or that of a folder: its path and its text."""
    path = path / "tokenizer.json" if path.is_dir() else path
    return str(path), read_text(path, "tokenizer", _TOKENIZER)


@lru_cache(maxsize=4)
def _parsed(text: str, path: str, tokenizer: tuple[str, str] | None, characters_per_token: float) -> RequestFile:
    """Parse a text once for many simulations."""
    start = text.lstrip()[:1]
    if start == "[":
        value = parse_json(text, "workload", path, _FORMATS)
        return RequestFile("conversations", *read_conversations(value, path, _counter(tokenizer, characters_per_token)))
    if start == "{":
        return _lines(text, path, _counter(tokenizer, characters_per_token))
    return _table(text, path)


def _counter(tokenizer: tuple[str, str] | None, characters_per_token: float) -> Count:
    """Make a function that counts the tokens of a text, without special tokens."""
    if tokenizer is None:
        size = positive("characters_per_token", characters_per_token)
        return lambda text: -int(-len(text) // size)
    from tokenizers import Tokenizer

    path, text = tokenizer
    try:
        loaded = Tokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself
        raise InputError("tokenizer", path, f"{_TOKENIZER} ({error})") from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def _lines(text: str, path: str, tokens: Count) -> RequestFile:
    """Read lines of JSON: lengths with times, or requests of specsim run."""
    first = parse_json(next(filter(str.strip, text.split("\n"))), "workload", path, _FORMATS)
    if isinstance(first, Mapping) and ("prompt" in first or "prompt_ids" in first):
        return RequestFile("specsim requests", *read_prompts(text, path, tokens))
    work = parse_workload(text, path)
    turns = zip(work.prompt_tokens.tolist(), work.output_tokens.tolist(), strict=True)
    times = np.zeros(len(work)) if work.arrivals_s is None else work.arrivals_s
    return RequestFile("specsim lengths", tuple((Turn(*each),) for each in turns), times - times[0])


def _table(text: str, path: str) -> RequestFile:
    table = read_table(text, "workload", path)
    for name, fields, seconds in (("Azure", _AZURE, _moment), ("BurstGPT", _BURSTGPT, Row.number)):
        if set(fields).issubset(table.columns):
            return _requests(name, table, path, fields, seconds)
    raise InputError("workload", path, _FORMATS)


def _requests(
    name: str, table: Table, path: str, fields: tuple[str, str, str], seconds: Callable[[Row, str], float]
) -> RequestFile:
    found = []
    skipped = 0
    for row in table.rows:
        time = seconds(row, fields[0])
        prompt, output = (row.integer(field, 0, MOST_TOKENS) for field in fields[1:])
        if prompt and output:
            found.append((time, prompt, output))
        else:
            skipped += 1
    require(found, "workload", path, "a file of at least one request with prompt and output")
    found.sort(key=lambda each: each[0])
    times = np.array([time for time, _, _ in found])
    return RequestFile(name, tuple((Turn(*lengths),) for _, *lengths in found), times - times[0], skipped)


def _moment(row: Row, column: str) -> float:
    """Read the seconds of a date with a time, UTC unless it names a zone."""
    text = row.fields[column]
    try:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise InputError(column, text, f"a time such as 2023-11-16 18:17:03.979 (in {row.place})") from error
