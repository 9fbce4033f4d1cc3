"""Oracle of speculative decoding, with no KV cache, tree mask or pool: one full forward for every node's token path.

A round starts from tokens x_0..x_L; the last is its root, and L is its root_len. The drafter (EAGLE: arXiv 2401.15077
and 2503.01840) grows candidates below the root. The best of them form a tree (EAGLE-2: arXiv 2406.16858), or sampled
lanes do. A verifier (specsim.reference.oracle_verify) accepts a path of drafts, and one more token, the bonus, follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError
from specsim.core.kinds import KINDS, OWN
from specsim.core.kv_buffer import KVFormat
from specsim.core.verifiers import resolve
from specsim.reference.oracle_distributions import inverse_cdf, logprob, next_distribution, ranked
from specsim.reference.oracle_draft import DraftNode, Path, limits_of, proposed_nodes, select
from specsim.reference.oracle_forward import in_dtype
from specsim.reference.oracle_request import Draws, OracleRequest, next_logits
from specsim.reference.oracle_verify import OracleDrafts, accepted


@dataclass(frozen=True, slots=True)
class OracleRound:
    """One round of a request."""

    paths: tuple[Path, ...]  # the tree's nodes in order, as their tokens below the root
    scores: tuple[float, ...]  # by node
    root: int  # token
    root_len: int  # L
    accepted: Path  # drafts and bonus, never truncated
    logprobs: tuple[float, ...]  # by accepted token


@dataclass(frozen=True, slots=True)
class OracleResult:
    """The output of a request, and its rounds, which make all tokens but the first."""

    token_ids: Path
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    rounds: tuple[OracleRound, ...]


def generate(
    pair: Any,
    prompt_ids: Sequence[int],
    config: SpecConfig,
    sampling: SamplingParams,
    draws: Draws,
    dtype: torch.dtype = torch.float64,
    grammar: Any = None,
    token_drafter: Any = None,
    *,
    formats: Sequence[KVFormat] = (KVFormat(), KVFormat()),
    draft_steps: Sequence[int] = (),
) -> OracleResult:
    """Decode one request of a specsim.core.pair.Pair, with models in dtype and distributions in float64.

    formats: of the target's and the drafter's KV. token_drafter: a specsim.core.token_drafter.TokenDrafter in place of
    the pair's drafter, or of its lookup where it has one. draft_steps: most depth of a draft by round, after the last
    one from the first on again; (): that of config.
    """
    target = in_dtype(pair.target, dtype, formats[0])
    prompt_len = len(prompt_ids)
    drafter = token_drafter if pair.lookup is None else None
    if drafter is None and not config.is_plain and pair.drafter is not None:
        drafter = in_dtype(pair.drafter, dtype, formats[1])
    max_len = config.max_len or target.config.max_position_embeddings
    if not 0 < prompt_len < max_len:
        raise InputError("prompt length", prompt_len, f"1 to {max_len - 1}, one less than max_len")
    request = OracleRequest(target, drafter, config, sampling, draws, prompt_len, max_len, grammar)
    if pair.lookup is not None:
        request = replace(request, lookup=token_drafter)

    tokens = list(prompt_ids)
    rounds = []
    logits = next_logits(request, tokens, tokens)
    first = ranked(logits)[0]
    if sampling.temperature > 0:
        first = inverse_cdf(next_distribution(logits, sampling), draws.uniform("PREFILL", prompt_len - 1, 0, 0))
    logprobs = [logprob(logits, first, sampling)]
    finish_reason = append(tokens, [first], request)
    while finish_reason is None:
        root = DraftNode((), None, 0, 1.0 if config.score == "prob" else 0.0, None, None, ())
        steps = draft_steps[len(rounds) % len(draft_steps)] if draft_steps else config.num_steps
        tree = select(grow(request, tokens, root, steps), config.num_draft_tokens - 1)
        rounds.append(verify(request, tokens, [root, *tree]))
        finish_reason = append(tokens, rounds[-1].accepted, request)
        logprobs += rounds[-1].logprobs
    token_ids = tuple(tokens[prompt_len:])
    return OracleResult(token_ids, tuple(logprobs[: len(token_ids)]), finish_reason, tuple(rounds))


def grow(request: OracleRequest, tokens: list[int], root: DraftNode, depth: int) -> list[DraftNode]:
    """Grow all candidates of at most this depth below the root, none without a drafter."""
    if request.drafter is None:
        return []
    if request.lookup is not None:
        proposal = request.lookup.propose(0, tokens, limits_of(request))
        if proposal.tokens:
            return [node for node in proposed_nodes(proposal, root) if len(node.path) <= depth]
    kind = KINDS[request.draft_config.kind] if hasattr(request.drafter, "tensors") else OWN
    return [node for node in resolve(kind.oracle)(request, tokens, root, depth) if len(node.path) <= depth]


def append(tokens: list[int], accepted: Sequence[int], request: OracleRequest) -> Literal["stop", "length"] | None:
    """Append tokens up to the one that ends the request, and return the finish reason, None if it goes on."""
    sampling = request.sampling
    eos_token_ids = request.target.config.eos_token_ids
    for token in accepted:
        tokens.append(token)
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            return "stop"
        if len(tokens) == min(request.max_len, request.prompt_len + sampling.max_new_tokens):
            return "length"
    return None


def verify(request: OracleRequest, tokens: list[int], nodes: list[DraftNode]) -> OracleRound:
    """Verify the drafts below a root.

    A node deeper than max_len - 1 - L is never accepted.
    """
    sampling = request.sampling
    root_len = len(tokens) - 1
    draws = request.draws

    @cache
    def logits(path: Path) -> torch.Tensor:
        row = [*tokens, *path]
        return next_logits(request, row, row if request.config.penalties == "exact" else tokens)

    drafts = OracleDrafts(
        nodes=[node for node in nodes if len(node.path) <= max(0, request.max_len - 1 - root_len)],
        logits=lambda node: logits(node.path),
        prob=lambda node: next_distribution(logits(node.path), sampling),
        uniform=lambda stream, depth, index: draws.uniform(stream, root_len, depth, index),
        noise=lambda depth: draws.noise(root_len + depth + 1),
    )
    path = accepted(drafts, request.config, is_greedy=sampling.temperature == 0)
    logprobs = tuple(logprob(logits(path[:depth]), token, sampling) for depth, token in enumerate(path))
    paths = tuple(node.path for node in nodes[1:])
    scores = tuple(node.score for node in nodes[1:])
    return OracleRound(paths, scores, tokens[-1], root_len, path, logprobs)
