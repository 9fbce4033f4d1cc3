"""Request files: JSON lines, each a request with its sampling, schedule and conversation."""

import json
import re
import reprlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from specsim.core.config import SamplingParams
from specsim.core.errors import InputError, require
from specsim.core.files import read_text
from specsim.core.pair import Pair
from specsim.serving.requests import Request, make_request

_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_SCHEDULE = ("arrival", "priority", "continues", "abort_at")
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")
_FIELDS = ("id", "prompt", "prompt_ids", *_SCHEDULE, *_SAMPLING)


class SkippedLine(NamedTuple):
    """A line of a request file that is not a request."""

    line: int  # from 1
    reason: str


@dataclass(frozen=True, slots=True)
class ParsedRequests:
    """The requests of a file in order, and its skipped lines."""

    requests: list[Request]
    skipped: list[SkippedLine]


def read_requests(path: Path | str, pair: Pair, skip_bad_lines: bool = False) -> ParsedRequests:
    """Read a UTF-8 file of requests, as parse_requests does.

    Raises InputError also for an unreadable file.
    """
    return parse_requests(read_file(path), path, pair, skip_bad_lines)


def parse_requests(text: str, path: Path | str, pair: Pair, skip_bad_lines: bool = False) -> ParsedRequests:
    """Parse the requests of a text, one JSON object a line, with errors that name `path`.

    Blank lines are ignored.

    Fields: id (default: the line's number from 0), either prompt (text) or prompt_ids, arrival, priority, continues
    (the id of an earlier line, whose conversation this prompt continues), abort_at, and those of SamplingParams. A line
    that is not a valid request raises InputError, or is skipped with its reason. A text without a request raises
    InputError too. The length of a prompt is not checked.
    """
    requests: dict[int, Request] = {}
    skipped: list[SkippedLine] = []
    for index, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        try:
            request = _request(line, index, pair, requests)
        except InputError as error:
            reason = f"a line whose {error.name} is {error.allowed}, not {reprlib.repr(error.value)}"
            if not skip_bad_lines:
                raise InputError("requests", f"{path}, line {index + 1}", reason) from error
            skipped.append(SkippedLine(index + 1, reason))
        else:
            requests[request.request_id] = request
    if not requests:
        why = f" (line {skipped[0].line} is not {skipped[0].reason})" if skipped else ""
        raise InputError("requests", str(path), f"a file of at least one request{why}")
    return ParsedRequests(list(requests.values()), skipped)


def read_file(path: Path | str) -> str:
    """Read the text of a request file, or raise InputError."""
    return read_text(Path(path), "requests", "a UTF-8 file that can be read")


def _request(line: str, index: int, pair: Pair, earlier: dict[int, Request]) -> Request:
    values = _parse(line)
    request_id = values.get("id", index)
    if type(request_id) is not int or request_id in earlier:
        raise InputError("id", request_id, "an integer of no earlier line")
    continues = values.get("continues")
    if continues is not None and (type(continues) is not int or continues not in earlier):
        raise InputError("continues", continues, "the id of an earlier line")
    schedule = {name: values[name] for name in _SCHEDULE if name in values}
    params = SamplingParams(**{name: _sampling_value(name, values[name]) for name in _SAMPLING if name in values})
    return make_request(pair.target.config, pair.tokenizer, request_id, _prompt(values), params, **schedule)


def _parse(line: str) -> dict[str, Any]:
    """Parse a JSON object of known fields, each at most once, without NaN and infinity."""
    try:
        values = json.loads(line, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise InputError("text", line, f"a JSON object ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise InputError("text", line, f"a JSON object ({error})") from error
    require(isinstance(values, dict), "text", line, "a JSON object")
    for name in values:
        require(name in _FIELDS, "every field", name, f"one of {', '.join(_FIELDS)}")
    return values


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a field occurs twice")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _prompt(values: dict[str, Any]) -> str | list[int]:
    if ("prompt" in values) == ("prompt_ids" in values):
        raise InputError("input", "both" if "prompt" in values else "neither", "one of prompt and prompt_ids")
    if "prompt" in values:
        require(isinstance(values["prompt"], str), "prompt", values["prompt"], "a text (token ids: prompt_ids)")
        return values["prompt"]
    require(isinstance(values["prompt_ids"], list), "prompt_ids", values["prompt_ids"], "a list")
    return values["prompt_ids"]


def _sampling_value(name: str, value: Any) -> Any:
    """Convert a JSON value for SamplingParams, which checks all fields but ignore_eos and logit_bias."""
    if name == "ignore_eos" and not isinstance(value, bool):
        raise InputError(name, value, "true or false")
    if name != "logit_bias":
        return value
    if not isinstance(value, dict) or not all(_TOKEN_ID.fullmatch(token) for token in value):
        raise InputError(name, value, "an object of numbers by token id")
    return {int(token): bias for token, bias in value.items()}
