"""Document of an exploration: everything that the page draws of recorded rounds, as a JSON value."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specsim.core.config import SpecConfig
from specsim.core.display import token_texts
from specsim.core.files import without_nan
from specsim.core.json_schema import schema_name
from specsim.explorer.phases import request_round
from specsim.explorer.round import Round
from specsim.explorer.rounds import Rounds, Source

if TYPE_CHECKING:
    from specsim.plots.sheet import Decode

MOST_BYTES = 1_900_000  # of a document; a page with its program stays below 2 MB


def document(rounds: Rounds) -> dict[str, Any]:
    """Make the document of recorded rounds, of the first ones if all would exceed MOST_BYTES."""
    generation = rounds.generation
    other = deciding(rounds)
    requests = [
        (request, output.prompt_token_ids, output.token_ids, output.temperature, output.finish_reason)
        for request, output in zip(rounds.request_ids, generation.outputs, strict=True)
    ]
    is_greedy = all(output.temperature == 0 for output in generation.outputs)
    verifier = other or ("greedy at temperature 0" if is_greedy else generation.config.verifier)
    head = head_of(rounds.source, generation.config, verifier, requests, rounds.decode)
    places = {request: place for place, request in enumerate(rounds.request_ids)}
    made = (_round(each, places, other) for each in rounds)
    return finished(head, made, rounds.decode)


def head_of(
    source: Source,
    config: SpecConfig,
    verifier: str,
    requests: Iterable[tuple[int, Sequence[int], Sequence[int], float, str]],
    decode: "Decode",
) -> dict[str, Any]:
    """Make what a document says of the whole run.

    requests: id, prompt's tokens, output's tokens, temperature and finish reason of each.
    """
    described = [
        {
            "id": request,
            "prompt": decode(prompt),
            "prompt_len": len(prompt),
            "output": list(output),
            "pieces": token_texts(decode, prompt, output),
            "temperature": temperature,
            "finish_reason": reason,
        }
        for request, prompt, output, temperature, reason in requests
    ]
    made = {"config": asdict(config), "verifier": verifier, "requests": described, "mismatch": None}
    return {"schema": schema_name("exploration"), **asdict(source), **made}


def deciding(rounds: Rounds) -> str:
    """Name a rule of a user or a schedule that decides in place of the setting's verifier."""
    generation = rounds.generation
    return str(generation.rule or "") or (f"schedule {generation.synthetic}" if generation.synthetic else "")


def finished(head: dict[str, Any], rounds: Iterable[dict[str, Any]], decode: "Decode") -> dict[str, Any]:
    """Add the rounds that fit, and the text of every token that they name."""
    kept: list[dict[str, Any]] = []
    tokens = {str(token): decode([token]) for each in head.get("other", ()) for token in set(_tokens(each))}
    size = len(encoded(head)) + len(encoded(tokens))
    for each in rounds:
        texts = {str(token): decode([token]) for token in set(_tokens(each)) if str(token) not in tokens}
        size += len(encoded(each)) + len(encoded(texts))
        if kept and size > MOST_BYTES:
            break
        kept.append(each)
        tokens |= texts
    return without_nan(head | {"tokens": tokens, "rounds": kept})


def encoded(value: Any) -> bytes:
    """Write a value as compact JSON."""
    return json.dumps(without_nan(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        errors="backslashreplace"  # half a surrogate pair is one in JSON too
    )


def _round(each: Round, places: dict[int, int], other: str) -> dict[str, Any]:
    rows = enumerate(each.request_ids)
    made = [{"request": places[request]} | request_round(each, row, other) for row, request in rows]
    return {"index": each.index, "requests": made}


def _tokens(recorded: dict[str, Any]) -> Iterator[int]:
    """Yield the tokens that a round names, some of them several times."""
    for each in recorded["requests"]:
        yield from each["candidates"]["tokens"]
        yield from each["nodes"]["tokens"]
        yield from each["extend"]["tokens"]
        yield each["bonus"]
        for rows in each["after"]:
            yield from (row[0] for row in rows)
        for level in each["extend"]["next"]:
            yield from level["tokens"]
