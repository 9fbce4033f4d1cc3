"""The reference compared with the oracle, end to end: it sees faults that both implementations share."""

from typing import TYPE_CHECKING, Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair, record_of
from specsim.core.policies.fields import TREE
from specsim.core.uniforms import Stream, named_uniforms, seed_bits, token_noise
from specsim.core.verifiers import resolve
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.result import Divergence
from specsim.serving.generation import generate

if TYPE_CHECKING:
    from specsim.reference.oracle import Draws

ALLOWED = 2e-6  # logprobs are kept in float32


def compare_with_oracle(cell: Cell, pair: Pair) -> list[Divergence]:
    """Compare tokens, finish reasons, counters and logprobs of every request, in float64 with the same uniforms.

    The oracle takes a token drafter's proposals from the reference, and makes all else itself.
    """
    from specsim.reference import oracle

    ids = cell.request_ids or tuple(range(len(cell.prompts)))
    grammars = [cell.grammars.get(request_id) for request_id in ids]
    outputs = generate(
        pair,
        cell.prompts,
        cell.config,
        cell.sampling,
        grammars=grammars,
        request_ids=ids,
        engine=cell.options(EngineOptions(dtype=torch.float64)),
        adaptive=_script(cell),
    ).outputs
    divergences = []
    for request, (prompt, sampling, output) in enumerate(zip(cell.prompts, cell.sampling, outputs, strict=True)):
        named = draws(sampling.seed, ids[request], pair.target.config.vocab_size)
        truth = oracle.generate(
            pair,
            prompt,
            cell.config,
            sampling,
            named,
            grammar=grammars[request],
            token_drafter=_token_drafter(pair, cell.config),
            formats=cell.kv,
            draft_steps=cell.steps_from(ids[request]),
        )
        facts = (
            ("tokens", truth.token_ids, output.token_ids),
            ("finish reason", truth.finish_reason, output.finish_reason),
            ("counters", tuple(len(r.accepted) for r in truth.rounds), output.num_accepted_tokens_per_round),
        )
        wrong = [(name, expected, actual) for name, expected, actual in facts if expected != actual]
        errors = [abs(a - b) for a, b in zip(truth.logprobs, output.logprobs, strict=False)]
        if not wrong and not max(errors) <= ALLOWED:
            wrong = [("logprobs", truth.logprobs, output.logprobs)]
        if wrong:
            divergences.append(Divergence(cell.id, 0, "oracle against reference", request, None, *wrong[0]))
    return divergences


def _token_drafter(pair: Pair, config: SpecConfig) -> Any:
    """Make the reference's token drafter of the pair, alone or next to one with weights; None without one."""
    drafter = pair.lookup or (pair.drafter if pair.checkpoint is None else None)
    if drafter is None:
        return None
    make = resolve(record_of(drafter).reference)
    return make(drafter, pair.target, config, Placement(torch.float64)).token_drafter


def _script(cell: Cell) -> dict[str, Any] | None:
    """Make the policy that gives requests the cell's draft steps under its one setting, None without them."""
    if not cell.draft_steps:
        return None
    tree = {name: getattr(cell.config, name) for name in TREE}
    return {"policy": "scripted", "settings": [tree], "script": list(cell.draft_steps), "per_request": True}


def draws(seed: int, request_id: int, vocab_size: int) -> "Draws":
    """Return the engines' uniforms of a request in the form that the oracle takes."""
    from specsim.reference.oracle import Draws

    bits = seed_bits(seed)
    named = torch.tensor(bits)
    request = torch.tensor(request_id)

    def uniform(stream: str, root_len: int, depth: int, index: int) -> float:
        return float(named_uniforms(bits, request_id, Stream[stream], root_len, depth, index))

    return Draws(uniform, lambda position: token_noise(named, request, torch.tensor(position), vocab_size))
