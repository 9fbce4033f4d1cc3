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
from specsim.explorer.rounds import Rounds, RoundsSource

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
    row_of = {request: row for row, request in enumerate(rounds.request_ids)}
    drawn_rounds = (_round(recorded_round, row_of, other) for recorded_round in rounds)
    return finished(head, drawn_rounds, rounds.decode)


def head_of(
    source: RoundsSource,
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
    run = {"config": asdict(config), "verifier": verifier, "requests": described, "mismatch": None}
    return {"schema": schema_name("exploration"), **asdict(source), **run}


def deciding(rounds: Rounds) -> str:
    """Name a rule of a user or a schedule that decides in place of the setting's verifier."""
    generation = rounds.generation
    return str(generation.rule or "") or (f"schedule {generation.synthetic}" if generation.synthetic else "")


def finished(head: dict[str, Any], rounds: Iterable[dict[str, Any]], decode: "Decode") -> dict[str, Any]:
    """Add the rounds that fit, and the text of every token that they name."""
    written: list[dict[str, Any]] = []
    tokens = {
        str(token): decode([token])
        for recorded_round in head.get("other", ())
        for token in set(_tokens(recorded_round))
    }
    size = len(encoded(head)) + len(encoded(tokens))
    for recorded_round in rounds:
        texts = {str(token): decode([token]) for token in set(_tokens(recorded_round)) if str(token) not in tokens}
        size += len(encoded(recorded_round)) + len(encoded(texts))
        if written and size > MOST_BYTES:
            break
        written.append(recorded_round)
        tokens |= texts
    return without_nan(head | {"tokens": tokens, "rounds": written})


def encoded(value: Any) -> bytes:
    """Write a value as compact JSON."""
    return json.dumps(without_nan(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        errors="backslashreplace"  # half a surrogate pair is one in JSON too
    )


def _round(recorded_round: Round, row_of: dict[int, int], other: str) -> dict[str, Any]:
    rows = enumerate(recorded_round.request_ids)
    requests = [{"request": row_of[request]} | request_round(recorded_round, row, other) for row, request in rows]
    return {"index": recorded_round.index, "requests": requests}


def _tokens(recorded: dict[str, Any]) -> Iterator[int]:
    """Yield the tokens that a round names, some of them several times."""
    for request in recorded["requests"]:
        yield from request["candidates"]["tokens"]
        yield from request["nodes"]["tokens"]
        yield from request["extend"]["tokens"]
        yield request["bonus"]
        for rows in request["after"]:
            yield from (row[0] for row in rows)
        for level in request["extend"]["next"]:
            yield from level["tokens"]
