"""Readers of request files: Azure and BurstGPT traces, ShareGPT conversations, and specsim's own lines of JSON."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specsim.core.config import SamplingParams
from specsim.core.errors import InputError, require
from specsim.core.files import parse_json, read_text
from specsim.core.limits import MOST_TOKENS
from specsim.core.table import Table, TableRow, read_table
from specsim.simulator.bounds import count, positive
from specsim.simulator.request_file import RequestFile, Turn
from specsim.simulator.workload import CHARACTERS, parse_workload

Count = Callable[[str], int]  # tokens of a text
_MESSAGES = ("conversations", "conversation", "messages")
_SPEAKER = ("from", "role")
_TEXT = ("value", "content")
_ASSISTANTS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


def read_conversations(value: Any, path: str, tokens: Count) -> tuple[tuple[tuple[Turn, ...], ...], None, int]:
    """Read a list of conversations as ShareGPT's, messages with from and value, or with role and content.

    Returns turns by conversation, no times, and the number of answers left out, since they or their prompts are empty.
    The tokens of a chat template are not counted.
    """
    conversations = []
    skipped = 0
    for number, conversation in enumerate(value, start=1):
        location = f"{path}, conversation {number}"
        turns, empty = _turns(_messages(conversation, location), location, tokens)
        skipped += empty
        if turns:
            conversations.append(tuple(turns))
    require(conversations, "workload", path, "conversations with at least one answer of gpt or assistant")
    return tuple(conversations), None, skipped


def _turns(messages: list, location: str, tokens: Count) -> tuple[list[Turn], int]:
    turns: list[Turn] = []
    before = known_tokens = empty = 0
    for number, message in enumerate(messages, start=1):
        where = f"{location}, message {number}"
        speaker, text = _field(message, _SPEAKER, where), _field(message, _TEXT, where)
        size = tokens(text)
        if speaker.lower() in _ASSISTANTS:
            if before and size:
                turns.append(Turn(before, size, known_tokens))
                known_tokens = before + size
            else:
                empty += 1
        before += size
    return turns, empty


def _messages(conversation: Any, location: str) -> list:
    named = [conversation.get(name) for name in _MESSAGES] if isinstance(conversation, Mapping) else [conversation]
    messages = next((entry for entry in named if isinstance(entry, list)), None)
    if messages is None:
        raise InputError("workload", location, "an object with a list of messages under conversations or messages")
    return messages


def _field(message: Any, names: tuple[str, str], location: str) -> str:
    values = [message.get(name) for name in names] if isinstance(message, Mapping) else []
    text = next((value for value in values if isinstance(value, str)), None)
    if text is None:
        raise InputError("workload", location, f"a message with a text under {' or '.join(names)}")
    return text


def read_prompts(text: str, path: str, tokens: Count) -> tuple[tuple[tuple[Turn, ...], ...], None, int]:
    """Read the requests of a file of specsim run: an output has max_new_tokens, whether or not it would end before.

    Their arrival is a step, not a time: it is not used. `continues` makes a turn of a conversation.
    """
    conversations: dict[Any, list[Turn]] = {}  # by the id of the last turn
    ordered: list[list[Turn]] = []
    for index, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        location = f"{path}, line {index + 1}"
        value = parse_json(line, "workload", location, "a line that is a JSON object")
        if not isinstance(value, Mapping):
            raise InputError("workload", location, "a line that is a JSON object")
        output = _output(value, location)
        continued = value.get("continues")
        request_id = value.get("id", index)
        for name, key in (("id", request_id), ("continues", continued)):
            require(key is None or isinstance(key, (str, int)), "workload", location, f"a line whose {name} is a text")
        turns = [] if continued is None else conversations.pop(continued, None)
        if turns is None:
            raise InputError("workload", location, f"a line that continues the id of an earlier one, not {continued!r}")
        known_tokens = turns[-1].prompt_tokens + turns[-1].output_tokens if turns else 0
        if not turns:
            ordered.append(turns)
        turns.append(Turn(known_tokens + _prompt(value, location, tokens), output, known_tokens))
        conversations[request_id] = turns
    return tuple(map(tuple, ordered)), None, 0


def _output(value: Mapping[str, Any], location: str) -> int:
    try:
        return count("max_new_tokens", value.get("max_new_tokens", SamplingParams().max_new_tokens))
    except InputError as error:
        raise InputError("workload", location, f"a max_new_tokens that is {error.allowed}") from error


def _prompt(value: Mapping[str, Any], location: str, tokens: Count) -> int:
    """Count the tokens of a prompt."""
    ids = value.get("prompt_ids")
    size = len(ids) if isinstance(ids, list) else 0
    if isinstance(value.get("prompt"), str):
        size = tokens(value["prompt"])
    require(size, "workload", location, "a request with a prompt or prompt_ids, not empty")
    return size


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
    return RequestFile("specsim lengths", tuple((Turn(*lengths),) for lengths in turns), times - times[0])


def _table(text: str, path: str) -> RequestFile:
    table = read_table(text, "workload", path)
    for name, fields, seconds in (("Azure", _AZURE, _moment), ("BurstGPT", _BURSTGPT, TableRow.number)):
        if set(fields).issubset(table.columns):
            return _requests(name, table, path, fields, seconds)
    raise InputError("workload", path, _FORMATS)


def _requests(
    name: str, table: Table, path: str, fields: tuple[str, str, str], seconds: Callable[[TableRow, str], float]
) -> RequestFile:
    requests = []
    skipped = 0
    for row in table.rows:
        time = seconds(row, fields[0])
        prompt, output = (row.integer(field, 0, MOST_TOKENS) for field in fields[1:])
        if prompt and output:
            requests.append((time, prompt, output))
        else:
            skipped += 1
    require(requests, "workload", path, "a file of at least one request with prompt and output")
    requests.sort(key=lambda request: request[0])
    times = np.array([time for time, _, _ in requests])
    return RequestFile(name, tuple((Turn(*lengths),) for _, *lengths in requests), times - times[0], skipped)


def _moment(row: TableRow, column: str) -> float:
    """Read the seconds of a date with a time, UTC unless it names a zone."""
    text = row.fields[column]
    try:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise InputError(column, text, f"a time such as 2023-11-16 18:17:03.979 (in {row.location})") from error
