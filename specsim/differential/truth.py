"""The reference against the oracle, end to end: what both columns share cannot be seen by comparing them."""

import torch

from specsim.differential.cell import Cell
from specsim.differential.divergence import Divergence
from specsim.generation import generate
from specsim.uniforms import Stream, coins, seed_bits

ALLOWED = 2e-6  # logprobs are kept in float32


def compare_with_oracle(cell: Cell, pair) -> list[Divergence]:
    """Tokens, finish reasons, counters and logprobs of every request, in float64 from the same uniforms.

    The oracle knows target-only sampling and no grammars; what other verifiers emit at temperatures above 0 is judged
    by their laws.
    """
    if cell.config.verifier != "target_only" or cell.grammars:
        return []
    from specsim.reference import oracle

    ids = cell.request_ids or tuple(range(len(cell.prompts)))
    outputs = generate(pair, cell.prompts, cell.config, cell.sampling, request_ids=ids, dtype=torch.float64).outputs
    divergences = []
    for request, (prompt, sampling, output) in enumerate(zip(cell.prompts, cell.sampling, outputs, strict=True)):
        truth = oracle.generate(pair, prompt, cell.config, sampling, _draw(sampling.seed, ids[request]))
        facts = (
            ("tokens", truth.token_ids, output.token_ids),
            ("finish reason", truth.finish_reason, output.finish_reason),
            ("counters", tuple(len(r.accepted) for r in truth.rounds), output.num_accepted_tokens_per_round),
        )
        wrong = [(name, expected, found) for name, expected, found in facts if expected != found]
        errors = [abs(a - b) for a, b in zip(truth.logprobs, output.logprobs, strict=False)]
        if not wrong and not max(errors) <= ALLOWED:
            wrong = [("logprobs", truth.logprobs, output.logprobs)]
        divergences += [Divergence(cell.id, 0, "oracle against reference", request, None, *each) for each in wrong[:1]]
    return divergences


def _draw(seed: int, request_id: int):
    return lambda stream, root_len, depth: float(coins(seed_bits(seed), request_id, Stream[stream], root_len, depth))
