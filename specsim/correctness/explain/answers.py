"""Engines' answers, as specsim, vLLM, SGLang and OpenAI's API write them, or an event stream of OpenAI's or SGLang's.

An answer needs no log probabilities: ids or a text alone show the first difference.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, Self

from specsim.core.errors import InputError, require
from specsim.core.files import is_event_stream, parse_json_lines, read_text
from specsim.core.limits import MOST_TOKENS

ALLOWED = "answers of specsim generate or run, of vLLM, of SGLang's /generate, or of OpenAI's API"
UNCLEAR = "\ufffd"  # in a token's text for bytes that are no text by themselves
MOST_LOGPROB = 0.1  # logarithms of probabilities that 16-bit arithmetic rounded can lie a little above 0
Token = int | str
Unit = Literal["token", "character"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    tokens: tuple[Token, ...]  # ids, or texts where the engine gave no ids, bytes written as \\xf0; or characters
    logprobs: tuple[float | None, ...]  # natural logarithms, None where not given
    top: tuple[Mapping[Token, float], ...] = field(repr=False)  # reported log probabilities, the chosen token's too
    prompt: tuple[int, ...] | str | None = field(default=None, repr=False)  # token ids, or the text
    is_sampled: bool = False  # as the file says; otherwise a likelier token shows it
    text: str | None = field(default=None, repr=False, compare=False)  # of all tokens; None where the file has none
    unit: Unit = "token"  # character: the file has the text alone

    @classmethod
    def of(
        cls,
        chosen: Sequence[tuple[Any, Any]],
        top: Sequence[Mapping[Any, Any] | None] | None = None,
        prompt: list[int] | str | None = None,
        is_sampled: bool = False,
        text: str | None = None,
    ) -> Self:
        """Make an answer of pairs (token, log probability), and the log probabilities reported at each place."""
        tokens = tuple(_token(token) for token, _ in chosen)
        logprobs = tuple(_logprob(logprob) for _, logprob in chosen)
        reported = [_reported(row) for row in top or ()]
        if len(reported) not in (0, len(tokens)):
            raise _Unreadable(f"it has log probabilities of {len(reported)} places for {len(tokens)} tokens")
        reported = reported or [{} for _ in tokens]
        for token, logprob, token_logprobs in zip(tokens, logprobs, reported, strict=True):
            if logprob is not None:
                token_logprobs.setdefault(token, logprob)
        context = tuple(prompt) if isinstance(prompt, list) else prompt
        return cls(tokens, logprobs, tuple(reported), context, is_sampled, text)

    def by_character(self) -> "Answer":
        """Make the answer of its text's characters, without log probabilities; the answer itself without a text."""
        text = self.text
        if text is None and all(isinstance(token, str) for token in self.tokens):
            text = "".join(map(str, self.tokens))
        if text is None:
            return self
        return replace(self, tokens=tuple(text), logprobs=(None,) * len(text), top=({},) * len(text), unit="character")


class _Unreadable(ValueError):
    """One sentence about an entry that is no answer."""


def read_answers(path: Path, name: str) -> tuple[Answer, ...]:
    """Read a file of JSON, of JSON lines or of a stream's events, each entry with one or more answers.

    InputError under that name for any other file, and for an entry without an answer.
    """
    answers: list[Answer] = []
    text = read_text(path, name, ALLOWED)
    values = parse_json_lines(text, name, str(path), ALLOWED)
    entries = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    index = 0
    try:
        for index, entry in enumerate(_joined(entries) if is_event_stream(text) else entries):  # noqa: B007
            answers += _answers(entry)
    except RecursionError as error:
        raise InputError(name, str(path), f"{ALLOWED} (entry {index}, counted from 0: lists within lists)") from error
    except _Unreadable as error:
        raise InputError(name, str(path), f"{ALLOWED} (entry {index}, counted from 0: {error})") from error
    require(answers, name, str(path), ALLOWED)
    return tuple(answers)


def parse_answers(value: Any, name: str, source: str) -> tuple[Answer, ...]:
    """Parse the JSON of one response, or the list of a stream's events; InputError with that name for anything else."""
    try:
        return tuple(_answers(_joined(value) if isinstance(value, list) else value))
    except (_Unreadable, RecursionError) as error:
        raise InputError(name, source, f"{ALLOWED} ({error})") from error


def _answers(value: Any) -> Iterator[Answer]:
    if isinstance(value, list) and value:
        for entry in value:
            yield from _answers(entry)
        return
    answers = []
    if isinstance(value, dict) and (forms := [key for key in CONVERTERS if value.get(key) is not None]):
        answers = list(CONVERTERS[forms[0]](value))
    if not answers:
        keys = ", ".join(map(str, value)) if isinstance(value, dict) and value else "no key"
        raise _Unreadable(f"it has {keys}, and no answer in any of the known forms")
    yield from answers


def _ours(value: Mapping[str, Any]) -> Iterator[Answer]:
    """Convert specsim's form: token_ids, and optional logprobs, a number each, top_logprobs and temperature."""
    token_ids = _list(value["token_ids"], "token_ids")
    logprobs = _list(value.get("logprobs"), "logprobs") or [None] * len(token_ids)
    if len(logprobs) != len(token_ids):
        raise _Unreadable(f"it has {len(logprobs)} logprobs for {len(token_ids)} token_ids")
    top = value.get("top_logprobs")
    rows = [_by_id(row) for row in _list(top, "top_logprobs")] if top else None
    is_sampled = _number(value.get("temperature") or 0, "temperature") > 0
    chosen = list(zip(token_ids, logprobs, strict=True))
    yield Answer.of(chosen, rows, _prompt(value, "prompt_token_ids"), is_sampled, _text(value.get("text"), "text"))


def _outputs(value: Mapping[str, Any]) -> Iterator[Answer]:
    """Convert results of specsim generate and run, or vLLM's RequestOutput: {logprob, …} by place and token id."""
    for entry in _list(value["outputs"], "outputs"):
        output = _mapping(entry, "outputs")
        prompt = output.get("prompt_token_ids") or value.get("prompt_token_ids") or value.get("prompt")
        logprobs = output.get("logprobs")
        if output.get("token_ids") is None:
            yield from _of_text(output.get("text"), prompt)
            continue
        if isinstance(logprobs, list) and logprobs and isinstance(logprobs[0], Mapping):
            token_ids = _list(output["token_ids"], "token_ids")
            rows = [_by_id(row) for row in logprobs]
            if len(rows) != len(token_ids):
                raise _Unreadable(f"it has logprobs of {len(rows)} places for {len(token_ids)} token_ids")
            chosen = [row.get(_token(token)) for token, row in zip(token_ids, rows, strict=True)]
            output = {**output, "logprobs": chosen, "top_logprobs": logprobs}
        yield from _ours({**output, "prompt_token_ids": prompt})


def _sglang(value: Mapping[str, Any]) -> Iterator[Answer]:
    """Convert SGLang's /generate: meta_info with lists of (logprob, token id, text)."""
    meta = _mapping(value["meta_info"], "meta_info")
    text = _text(value.get("text"), "text")
    prompt = _prompt(value, "prompt_token_ids")
    if meta.get("output_token_logprobs") is None:
        if value.get("output_ids") is None:
            yield from _of_text(text, prompt)
        else:
            yield Answer.of(
                [(token, None) for token in _list(value["output_ids"], "output_ids")], None, prompt, text=text
            )
        return
    entries = _list(meta["output_token_logprobs"], "output_token_logprobs")
    chosen = [(token, logprob) for logprob, token in map(_pair, entries)]
    top = meta.get("output_top_logprobs")
    rows = [
        {token: logprob for logprob, token in map(_pair, _list(row, "output_top_logprobs"))}
        for row in _list(top, "output_top_logprobs")
    ]
    yield Answer.of(chosen, rows or None, prompt, text=text)


def _openai(value: Mapping[str, Any]) -> Iterator[Answer]:
    """Convert OpenAI's completions and chat completions: tokens are named by text, in chats by bytes as well."""
    choices = [_mapping(choice, "choices") for choice in _list(value["choices"], "choices")]
    for choice in sorted(choices, key=lambda choice: _number(choice.get("index") or 0, "index")):
        prompt = choice.get("prompt_token_ids") or value.get("prompt_token_ids") or value.get("prompt")
        message = _mapping(choice.get("message") or {}, "message")
        text = _text(choice.get("text", message.get("content")), "text")
        logprobs = _mapping(choice.get("logprobs") or {}, "logprobs")
        if logprobs.get("content") is not None:
            content = [_mapping(entry, "content") for entry in _list(logprobs["content"], "content")]
            rows = [_by_text(_list(entry.get("top_logprobs"), "top_logprobs")) for entry in content]
            chosen = [(_bytes_or_text(entry), entry.get("logprob")) for entry in content]
        elif logprobs.get("tokens") is not None:
            tokens = _list(logprobs["tokens"], "tokens")
            values = _list(logprobs.get("token_logprobs"), "token_logprobs") or [None] * len(tokens)
            if len(values) != len(tokens):
                raise _Unreadable(f"it has {len(values)} token_logprobs for {len(tokens)} tokens")
            rows = _list(logprobs.get("top_logprobs"), "top_logprobs")
            chosen = list(zip(tokens, values, strict=True))
        elif choice.get("token_ids") is not None:
            rows = []
            chosen = [(token, None) for token in _list(choice["token_ids"], "token_ids")]
        else:
            yield from _of_text(text, prompt)
            continue
        yield Answer.of(chosen, rows or None, _prompt({"prompt": prompt}, "prompt"), text=text)


def _of_text(text: Any, prompt: Any) -> Iterator[Answer]:
    """Make the answer of a text alone; nothing without a text."""
    text = _text(text, "text")
    if text is not None:
        context = _prompt({"prompt": prompt}, "prompt")
        yield Answer.of([], None, context, text=text).by_character()


CONVERTERS: dict[str, Callable[[Mapping[str, Any]], Iterator[Answer]]] = {
    "outputs": _outputs,
    "meta_info": _sglang,
    "choices": _openai,
    "token_ids": _ours,
}


def _joined(events: Sequence[Any]) -> list[Any]:
    """Join the events of each response: OpenAI's chunks one after the other; of SGLang's, which grow, the last."""
    responses: dict[Any, Any] = {}
    for event in events:
        value = _mapping(event, "an event")
        if "choices" not in value:
            name = str(_mapping(value.get("meta_info") or {}, "meta_info").get("id"))
            responses[name, value.get("index")] = value
            continue
        choices = responses.setdefault(str(value.get("id")), {"choices": {}})["choices"]
        for choice in (_mapping(choice, "choices") for choice in _list(value["choices"], "choices")):
            _append(choices.setdefault(str(choice.get("index")), {"index": choice.get("index")}), choice)
    return [
        {"choices": list(value["choices"].values())} if isinstance(value.get("choices"), dict) else value
        for value in responses.values()
    ]


def _append(response: dict[str, Any], chunk: Mapping[str, Any]) -> None:
    """Add a chunk's text, token ids and log probabilities to those of the chunks before it."""
    text = _text(_mapping(chunk.get("delta") or {}, "delta").get("content", chunk.get("text")), "text")
    if text is not None:
        response["text"] = response.get("text", "") + text
    if chunk.get("token_ids") is not None:
        response.setdefault("token_ids", []).extend(_list(chunk["token_ids"], "token_ids"))
    logprobs = response.setdefault("logprobs", {})
    for name, values in _mapping(chunk.get("logprobs") or {}, "logprobs").items():
        if isinstance(values, list):
            logprobs.setdefault(name, []).extend(values)


def _token(token: Any) -> Token:
    """Parse an id or a token's text; with return_tokens_as_token_ids vLLM writes ids as token_id:123."""
    if isinstance(token, str):
        number = token.removeprefix("token_id:")
        is_id = number != token and number.isascii() and number.isdecimal() and len(number) <= len(str(MOST_TOKENS))
        return int(number) if is_id else token
    if type(token) is not int or abs(token) > MOST_TOKENS:
        raise _Unreadable(f"{_repr_of(token)} stands where a token's id or text is expected")
    return token


def _logprob(value: Any) -> float | None:
    """Check a log probability; NaN and minus infinity, which faulty engines give, are kept."""
    if value is None:
        return None
    number = _number(value, "a log probability")
    if number > MOST_LOGPROB:
        raise _Unreadable(f"a log probability is {number:g}; a logarithm of a probability is at most 0")
    return number


def _reported(row: Mapping[Any, Any] | None) -> dict[Token, float]:
    logprobs = {_token(token): _logprob(value) for token, value in _mapping(row or {}, "top_logprobs").items()}
    return {token: logprob for token, logprob in logprobs.items() if logprob is not None}


def _by_id(row: Any) -> dict[int, float | None]:
    """Read log probabilities by token id, a text in JSON; each is a number or {logprob, …}."""
    logprobs = {}
    for token, value in _mapping(row or {}, "logprobs").items():
        number = token.removeprefix("-")
        if not (number.isascii() and number.isdecimal() and len(number) <= len(str(MOST_TOKENS))):
            raise _Unreadable(f"{_repr_of(token)} stands where a token's id is expected")
        logprobs[int(token)] = _logprob(value.get("logprob") if isinstance(value, Mapping) else value)
    return logprobs


def _by_text(entries: Sequence[Any]) -> dict[str, float]:
    """Collect log probabilities by token text; of equal texts the largest, so that no margin is overestimated."""
    largest: dict[str, float] = {}
    for value in entries:
        entry = _mapping(value, "top_logprobs")
        logprob = _logprob(entry.get("logprob"))
        if logprob is not None:
            for token in {_bytes_or_text(entry), str(entry["token"])}:
                largest[token] = max(logprob, largest.get(token, -inf))
    return largest


def _bytes_or_text(entry: Mapping[str, Any]) -> str:
    """Give a token's text, or its bytes where the text is unclear and all such tokens would be equal."""
    token = _text(entry.get("token"), "token")
    if token is None:
        raise _Unreadable("a token has no text")
    if UNCLEAR in token and entry.get("bytes"):
        values = _list(entry["bytes"], "bytes")
        if not all(type(value) is int and 0 <= value < 256 for value in values):
            raise _Unreadable("the bytes of a token are no numbers from 0 to 255")
        return bytes(values).decode(errors="backslashreplace")
    return token


def _pair(entry: Any) -> tuple[Any, Any]:
    """Take log probability and token id of SGLang's (logprob, token id, text)."""
    values = _list(entry, "a log probability")
    if len(values) < 2:
        raise _Unreadable("a log probability has no token id")
    return values[0], values[1]


def _prompt(value: Mapping[str, Any], name: str) -> Any:
    """Check a prompt: a text, token ids, or none."""
    prompt = value.get(name)
    if isinstance(prompt, list):
        return [_token(token) for token in prompt]
    if prompt is None or isinstance(prompt, str):
        return prompt
    raise _Unreadable(f"{name} is {_repr_of(prompt)}, neither a text nor token ids")


def _list(value: Any, name: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    raise _Unreadable(f"{name} is {_repr_of(value)}, no list")


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise _Unreadable(f"{name} is {_repr_of(value)}, no JSON object")


def _text(value: Any, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise _Unreadable(f"{name} is {_repr_of(value)}, no text")


def _number(value: Any, name: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (isinstance(value, int) and abs(value) > 2**53)
    ):
        raise _Unreadable(f"{name} is {_repr_of(value)}, no number")
    return float(value)


def _repr_of(value: Any) -> str:
    """Write a value of a message: one that JSON nests by its kind alone."""
    if isinstance(value, (list, Mapping)):
        return "a list" if isinstance(value, list) else "a JSON object"
    return repr(value) if value is not None else "null"
