"""Engines' answers with log probabilities, as specsim, vLLM, SGLang and OpenAI's API write them."""

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Self

from specsim.core.errors import InputError, require
from specsim.core.files import parse_json_lines, read_text

ALLOWED = "results of specsim generate or run, of vLLM, of SGLang's /generate, or of OpenAI's API, with logprobs"
UNCLEAR = "\ufffd"  # in a token's text for bytes that are no text by themselves
Token = int | str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    tokens: tuple[Token, ...]  # ids, or texts where the engine gave no ids, bytes written as \\xf0
    logprobs: tuple[float | None, ...]  # natural logarithms, None where not given
    top: tuple[Mapping[Token, float], ...] = field(repr=False)  # reported log probabilities, the chosen token's too
    prompt: tuple[int, ...] | str | None = field(default=None, repr=False)  # token ids, or the text
    is_sampled: bool = False  # as the file says; otherwise a likelier token shows it

    @classmethod
    def of(
        cls,
        chosen: Sequence[tuple[Any, Any]],
        top: Sequence[Mapping[Any, Any] | None] | None = None,
        prompt: list[int] | str | None = None,
        is_sampled: bool = False,
    ) -> Self:
        """Make an answer of pairs (token, log probability), and the log probabilities reported at each place."""
        tokens = tuple(_token(token) for token, _ in chosen)
        logprobs = tuple(None if logprob is None else float(logprob) for _, logprob in chosen)
        reported = [{_token(token): float(value) for token, value in (row or {}).items()} for row in top or ()]
        if len(reported) not in (0, len(tokens)):
            raise ValueError(f"log probabilities of {len(reported)} places for {len(tokens)} tokens")
        reported = reported or [{} for _ in tokens]
        for token, logprob, token_logprobs in zip(tokens, logprobs, reported, strict=True):
            if logprob is not None:
                token_logprobs.setdefault(token, logprob)
        context = tuple(prompt) if isinstance(prompt, list) else prompt
        return cls(tokens, logprobs, tuple(reported), context, is_sampled)


def _token(token: Any) -> Token:
    """Parse an id or a token's text; with return_tokens_as_token_ids vLLM writes ids as token_id:123."""
    if isinstance(token, str):
        return int(token[9:]) if token.startswith("token_id:") and token[9:].isdecimal() else token
    if type(token) is not int:
        raise TypeError(f"{token!r} is not a token id")
    return token


def _by_id(entries: Mapping[str, Any] | None) -> dict[int, float]:
    """Read log probabilities by token id, a text in JSON; each is a number or {logprob, …}."""
    return {
        int(token): float(value["logprob"] if isinstance(value, Mapping) else value)
        for token, value in (entries or {}).items()
    }


def read_answers(path: Path, name: str) -> tuple[Answer, ...]:
    """Read a file of JSON or JSON lines, each entry with one or more answers.

    InputError under that name for any other file, and for an entry without an answer.
    """
    answers: list[Answer] = []
    values = parse_json_lines(read_text(path, name, ALLOWED), name, str(path), ALLOWED)
    is_array = len(values) == 1 and isinstance(values[0], list)
    for at, entry in enumerate(values[0] if is_array else values):
        try:
            answers += _answers(entry)
        except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
            reason = f"entry {at}, counted from 0: {type(error).__name__}: {error}"
            raise InputError(name, str(path), f"{ALLOWED} ({reason})") from error
    require(answers, name, str(path), ALLOWED)
    return tuple(answers)


def _answers(value: Any) -> Iterator[Answer]:
    if isinstance(value, list) and value:
        for entry in value:
            yield from _answers(entry)
        return
    answers = []
    if isinstance(value, dict) and (forms := [key for key in CONVERTERS if key in value]):
        answers = list(CONVERTERS[forms[0]](value))
    if not answers:
        raise ValueError(f"{reprlib.repr(value)} holds no answer in any of the known forms")
    yield from answers


def _ours(value: Mapping[str, Any]) -> Iterator[Answer]:
    """Convert specsim's form: token_ids with logprobs, a number each, and optional top_logprobs and temperature."""
    top = value.get("top_logprobs")
    chosen = list(zip(value["token_ids"], value["logprobs"], strict=True))
    is_sampled = float(value.get("temperature") or 0) > 0
    yield Answer.of(chosen, top and list(map(_by_id, top)), value.get("prompt_token_ids"), is_sampled)


def _outputs(value: Mapping[str, Any]) -> Iterator[Answer]:
    """Convert results of specsim generate and run, or vLLM's RequestOutput: {logprob, …} by place and token id."""
    for output in value["outputs"]:
        prompt = output.get("prompt_token_ids") or value.get("prompt_token_ids") or value.get("prompt")
        logprobs = output["logprobs"]
        if logprobs and isinstance(logprobs[0], Mapping):
            top = list(map(_by_id, logprobs))
            chosen = [logprob_of.get(token) for token, logprob_of in zip(output["token_ids"], top, strict=True)]
            output = {"token_ids": output["token_ids"], "logprobs": chosen, "top_logprobs": logprobs}
        yield from _ours(output | {"prompt_token_ids": prompt})


def _sglang(value: Mapping[str, Any]) -> Iterator[Answer]:
    """Convert SGLang's /generate: meta_info with lists of (logprob, token id, text)."""
    meta = value["meta_info"]
    chosen = [(token, logprob) for logprob, token, *_ in meta["output_token_logprobs"]]
    top = meta.get("output_top_logprobs")
    reported = top and [{token: logprob for logprob, token, *_ in entries or ()} for entries in top]
    yield Answer.of(chosen, reported, value.get("prompt_token_ids"))


def _openai(value: Mapping[str, Any]) -> Iterator[Answer]:
    """Convert OpenAI's completions and chat completions: tokens are named by text, in chats by bytes as well."""
    for choice in value["choices"]:
        logprobs = choice["logprobs"]
        if "content" in logprobs:
            content = logprobs["content"]
            top = [_by_text(entry.get("top_logprobs") or ()) for entry in content]
            yield Answer.of([(_text(entry), entry["logprob"]) for entry in content], top, value.get("prompt"))
        else:
            chosen = list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
            yield Answer.of(chosen, logprobs.get("top_logprobs"), value.get("prompt"))


def _by_text(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Collect log probabilities by token text; of equal texts the largest, so that no margin is overestimated."""
    largest: dict[str, float] = {}
    for entry in entries:
        for token in {_text(entry), entry["token"]}:
            largest[token] = max(entry["logprob"], largest.get(token, -inf))
    return largest


def _text(entry: Mapping[str, Any]) -> str:
    """Give a token's text, or its bytes where the text is unclear and all such tokens would be equal."""
    if UNCLEAR in entry["token"] and entry.get("bytes"):
        return bytes(entry["bytes"]).decode(errors="backslashreplace")
    return entry["token"]


CONVERTERS: dict[str, Callable[[Mapping[str, Any]], Iterator[Answer]]] = {
    "outputs": _outputs,
    "meta_info": _sglang,
    "choices": _openai,
    "token_ids": _ours,
}
