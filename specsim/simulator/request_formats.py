"""Readers of request files: Azure and BurstGPT traces, ShareGPT conversations, and specsim's own lines of JSON."""

import csv
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from specsim.core.errors import InputError, require
from specsim.core.files import parse_json, read_text
from specsim.simulator.bounds import LARGEST_COUNT, is_number, positive
from specsim.simulator.conversations import read_conversations, read_prompts
from specsim.simulator.request_file import RequestFile, Turn
from specsim.simulator.workload import read_workload

CHARACTERS = 4.0  # per token of English text, a common rule; a tokenizer is better
Count = Callable[[str], int]  # tokens of a text
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
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
    path = Path(path)
    try:
        status = path.stat()
    except OSError as error:
        raise InputError("workload", str(path), f"a file that can be read ({error.strerror})") from error
    given = (None if tokenizer is None else str(tokenizer), characters_per_token)
    return _read(str(path), (status.st_mtime_ns, status.st_size), *given)


@lru_cache(maxsize=4)
def _read(path: str, version: tuple[int, int], tokenizer: str | None, characters_per_token: float) -> RequestFile:
    """Read a file once for many simulations; version: its time of change and size."""
    text = read_text(Path(path), "workload", "a UTF-8 file that can be read")
    start = text.lstrip()[:1]
    if start == "[":
        value = parse_json(text, "workload", path, _FORMATS)
        return RequestFile("conversations", *read_conversations(value, path, _counter(tokenizer, characters_per_token)))
    if start == "{":
        return _lines(text, path, _counter(tokenizer, characters_per_token))
    return _table(text, path)


def _counter(tokenizer: str | None, characters_per_token: float) -> Count:
    """Make a function that counts the tokens of a text, without special tokens."""
    if tokenizer is None:
        size = positive("characters_per_token", characters_per_token)
        return lambda text: -int(-len(text) // size)
    from tokenizers import Tokenizer

    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise InputError("tokenizer", str(path), f"a tokenizer.json, or a folder with one ({error})") from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def _lines(text: str, path: str, tokens: Count) -> RequestFile:
    """Read lines of JSON: lengths with times, or requests of specsim run."""
    first = parse_json(next(filter(str.strip, text.split("\n"))), "workload", path, _FORMATS)
    if isinstance(first, Mapping) and ("prompt" in first or "prompt_ids" in first):
        return RequestFile("specsim requests", *read_prompts(text, path, tokens))
    work = read_workload(path)
    turns = zip(work.prompt_tokens.tolist(), work.output_tokens.tolist(), strict=True)
    times = np.zeros(len(work)) if work.arrivals_s is None else work.arrivals_s
    return RequestFile("specsim lengths", tuple((Turn(*each),) for each in turns), times - times[0])


def _table(text: str, path: str) -> RequestFile:
    rows = csv.DictReader(StringIO(text, newline=""))
    columns = set(rows.fieldnames or ())
    for name, fields, seconds in (("Azure", _AZURE, _moment), ("BurstGPT", _BURSTGPT, _seconds)):
        if columns.issuperset(fields):
            return _requests(name, rows, path, fields, seconds)
    raise InputError("workload", path, _FORMATS)


def _requests(
    name: str, rows: csv.DictReader, path: str, fields: tuple[str, str, str], seconds: Callable[[str, str], float]
) -> RequestFile:
    found = []
    skipped = 0
    for place, row in _complete(rows, path):
        time = seconds(row[fields[0]], place)
        prompt, output = (_tokens(row[field], field, place) for field in fields[1:])
        if prompt and output:
            found.append((time, prompt, output))
        else:
            skipped += 1
    require(found, "workload", path, "a file of at least one request with prompt and output")
    found.sort(key=lambda each: each[0])
    times = np.array([time for time, _, _ in found])
    return RequestFile(name, tuple((Turn(*lengths),) for _, *lengths in found), times - times[0], skipped)


def _complete(rows: csv.DictReader, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield place and fields of every row."""
    try:
        for row in rows:
            place = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise InputError("workload", place, "a row with a field for each column")
            yield place, row
    except csv.Error as error:
        raise InputError("workload", path, f"a table as CSV ({error})") from error


def _moment(text: str, place: str) -> float:
    """Read the seconds of a date with a time, UTC unless it names a zone."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise InputError("workload", place, f"a TIMESTAMP such as 2023-11-16 18:17:03.979, not {text!r}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _seconds(text: str, place: str) -> float:
    value = _number(text)
    require(value is not None, "workload", place, f"a Timestamp in seconds, not {text!r}")
    return value or 0.0


def _tokens(text: str, field: str, place: str) -> int:
    value = _number(text)
    if value is None or value != int(value) or value > LARGEST_COUNT:
        raise InputError("workload", place, f"{field} that are an integer of at least 0, not {text!r}")
    return int(value)


def _number(text: Any) -> float | None:
    """Read a finite number of at least 0; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if is_number(value) and value >= 0 else None
