"""The truth of speculative decoding: no KV cache, no tree mask, no pool; one full forward for every node's token path.

A round starts from tokens x_0..x_L; the last is its root, L its root_len. The drafter (EAGLE: arXiv 2401.15077 and
2503.01840) grows candidates below the root, and the best form a tree (EAGLE-2: arXiv 2406.16858), or samples lanes of
them. A verifier (specsim.reference.oracle_verify) takes a path of drafts, and one more token, the bonus, follows it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Literal

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError
from specsim.reference.oracle_distributions import inverse_cdf, logprob, next_law, ranked
from specsim.reference.oracle_forward import draft_forward, in_dtype, target_forward
from specsim.reference.oracle_verify import Drafts, Node, Path, accepted


@dataclass(frozen=True, slots=True)
class Draws:
    """A request's randomness. uniform: the uniform of (stream, L of its round's root, depth, index). noise: Gumbel
    noise [V] of the token at a position.
    """

    uniform: Callable[[str, int, int, int], float]
    noise: Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class OracleRound:
    """paths: the tree's nodes in order, as their tokens below the root. accepted: drafts and bonus, never truncated."""

    paths: tuple[Path, ...]
    scores: tuple[float, ...]
    root: int
    root_len: int
    accepted: Path
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OracleResult:
    """What a request produced, and the rounds that did; the first token comes before any round."""

    token_ids: Path
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    rounds: tuple[OracleRound, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What stays the same while a request is decoded. drafter: None in plain decoding. grammar: None if free."""

    target: SimpleNamespace
    drafter: SimpleNamespace | None
    config: SpecConfig
    sampling: SamplingParams
    draws: Draws
    prompt_len: int
    max_len: int
    grammar: object | None

    @property
    def draws_drafts(self) -> bool:
        return self.config.is_sampled and self.sampling.temperature > 0


def generate(
    pair,
    prompt_ids: Sequence[int],
    config: SpecConfig,
    sampling: SamplingParams,
    draws: Draws,
    dtype=torch.float64,
    grammar=None,
) -> OracleResult:
    """Decode one request; models run in dtype, laws in float64. grammar: of specsim.core.grammar's protocol."""
    target, prompt_len = in_dtype(pair.target, dtype), len(prompt_ids)
    drafter = None if pair.drafter is None or config.is_plain else in_dtype(pair.drafter, dtype)
    max_len = config.max_len or target.config.max_position_embeddings
    if not 0 < prompt_len < max_len:
        raise InputError("prompt length", prompt_len, f"1 to {max_len - 1}, one less than max_len")
    request = Request(target, drafter, config, sampling, draws, prompt_len, max_len, grammar)

    tokens, rounds = list(prompt_ids), []
    logits = next_logits(request, tokens, tokens)
    first = ranked(logits)[0]
    if sampling.temperature > 0:
        first = inverse_cdf(next_law(logits, sampling), draws.uniform("PREFILL", prompt_len - 1, 0, 0))
    logprobs = [logprob(logits, first, sampling)]
    finish_reason = append(tokens, [first], request)
    while finish_reason is None:
        root = Node((), None, 0, 1.0 if config.score == "prob" else 0.0, None, None, ())
        tree = select(draft(request, tokens, root), config.num_draft_tokens - 1) if drafter else []
        rounds.append(verify(request, tokens, [root, *tree]))
        finish_reason = append(tokens, rounds[-1].accepted, request)
        logprobs += rounds[-1].logprobs
    token_ids = tuple(tokens[prompt_len:])
    return OracleResult(token_ids, tuple(logprobs[: len(token_ids)]), finish_reason, tuple(rounds))


def append(tokens: list[int], accepted: Sequence[int], request: Request) -> Literal["stop", "length"] | None:
    """Add tokens up to the one that ends the request; returns why it ended, None if it goes on."""
    sampling, eos_token_ids = request.sampling, request.target.config.eos_token_ids
    for token in accepted:
        tokens.append(token)
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            return "stop"
        if len(tokens) == min(request.max_len, request.prompt_len + sampling.max_new_tokens):
            return "length"
    return None


def draft(request: Request, tokens: list[int], root: Node) -> list[Node]:
    """All candidates: K below the root, then level by level. Of drafts that are not drawn K below each lane, and the K
    best of a level are the next lanes: K + (S-1)K² in all; of drawn ones one below each lane, which is then the lane.
    """
    target, config = request.target, request.config
    is_prob, feature_layers = config.score == "prob", request.drafter.config.feature_layers
    _, features_LF = target_forward(target.config, target.tensors, tokens[:-1], feature_layers)

    def propose(parent: Node, rows: tuple, lane: int, count: int) -> list[Node]:
        """`count` children of a node, the first of them in this lane."""
        hidden, law_V, ids, prob_K = None, None, range(count), torch.zeros(count)
        if len(features_LF) + len(rows) <= request.max_len:  # the last row stands below max_len
            token_ids = [*tokens[1:], *(token for token, _ in rows)]
            hidden, logits = draft_forward(request, token_ids, features_LF, [hidden for _, hidden in rows])
            if request.draws_drafts:
                law_V = draft_law(request, logits)
                ids = [drawn(request, law_V, len(tokens) - 1, len(parent.path), lane + i) for i in range(count)]
                prob_K = law_V[ids].float()
            else:
                ids, prob_K = draft_topk(request.drafter, logits, count)
        scores = parent.score * prob_K if is_prob else parent.score + prob_K.log()
        scores = scores.clamp(max=parent.score).tolist()
        return [
            Node((*parent.path, token), parent, lane + i, scores[i], law_V, hidden, rows) for i, token in enumerate(ids)
        ]

    lanes = propose(root, (), 0, config.topk)
    pool, lane_rows = list(lanes), [()] * config.topk
    for _ in range(config.num_steps - 1):
        before = lane_rows if config.draft_kv == "lane" else [node.rows for node in lanes]
        lane_rows = [(*rows, (node.token, node.hidden)) for rows, node in zip(before, lanes, strict=True)]
        count = 1 if config.is_sampled else config.topk
        families = [propose(node, lane_rows[i], i, count) for i, node in enumerate(lanes)]
        level = [child for family in families for child in family]
        best = ranked(torch.tensor([child.score for child in level]))[: config.topk]
        lanes = level if config.is_sampled else [level[i] for i in best]
        pool += level
    return pool


def draft_topk(drafter, logits: torch.Tensor, count: int) -> tuple[list[int], torch.Tensor]:
    """The likeliest draft tokens as target ids, and their float32 probabilities at temperature 1."""
    prob = logits.double().softmax(-1).float()
    draft_ids = ranked(logits)[:count]
    return target_ids(drafter, len(prob))[draft_ids].tolist(), prob[draft_ids]


def draft_law(request: Request, logits: torch.Tensor) -> torch.Tensor:
    """What drafts are drawn from, by target id, [V]: the drafter's law at the request's temperature, in float32."""
    prob = (logits.double() / request.sampling.temperature).softmax(-1)
    law_V = torch.zeros(request.target.config.vocab_size, dtype=torch.float64)
    law_V[target_ids(request.drafter, len(prob))] = prob
    return law_V.float().double()


def target_ids(drafter, count: int) -> torch.Tensor:
    """The target id of every draft id."""
    return torch.arange(count) + drafter.tensors.get("d2t", torch.zeros(count, dtype=torch.int64))


def drawn(request: Request, law_V: torch.Tensor, root_len: int, depth: int, lane: int) -> int:
    """A draft that follows a node of a depth: with a uniform of its own, or with the noise that its target has too."""
    if request.config.verifier == "gumbel":
        return ranked(law_V.log() + request.draws.noise(root_len + depth + 1))[0]
    return inverse_cdf(law_V, request.draws.uniform("DRAFT", root_len, depth, lane))


def select(pool: list[Node], count: int) -> list[Node]:
    """The best candidates, in pool order. With a child comes its parent, which scores no less and stands before it."""
    return [pool[i] for i in sorted(ranked(torch.tensor([node.score for node in pool]))[:count])]


def verify(request: Request, tokens: list[int], nodes: list[Node]) -> OracleRound:
    """What the verifier makes of the root and its drafts; a node deeper than max_len - 1 - L is never accepted."""
    sampling, root_len, draws = request.sampling, len(tokens) - 1, request.draws

    @cache
    def logits(path: Path) -> torch.Tensor:
        row = [*tokens, *path]
        return next_logits(request, row, row if request.config.penalties == "exact" else tokens)

    drafts = Drafts(
        nodes=[node for node in nodes if len(node.path) <= max(0, request.max_len - 1 - root_len)],
        logits=lambda node: logits(node.path),
        prob=lambda node: next_law(logits(node.path), sampling),
        uniform=lambda stream, depth, index: draws.uniform(stream, root_len, depth, index),
        noise=lambda depth: draws.noise(root_len + depth + 1),
    )
    path = accepted(drafts, request.config, is_greedy=sampling.temperature == 0)
    logprobs = tuple(logprob(logits(path[:depth]), token, sampling) for depth, token in enumerate(path))
    paths, scores = zip(*((node.path, node.score) for node in nodes[1:]), strict=True) if nodes[1:] else ((), ())
    return OracleRound(paths, scores, tokens[-1], root_len, path, logprobs)


def next_logits(request: Request, row: list[int], counted: list[int]) -> torch.Tensor:
    """float64 logits [V] of the token after `row`, after the penalties for `counted`, the bias and the grammar."""
    sampling = request.sampling
    logits = target_forward(request.target.config, request.target.tensors, row, ())[0][-1].double()
    seen, penalty = logits[counted], sampling.repetition_penalty
    logits[counted] = torch.where(seen > 0, seen / penalty, seen * penalty)
    count_V = torch.bincount(torch.tensor(counted[request.prompt_len :], dtype=torch.int64), minlength=len(logits))
    logits -= sampling.frequency_penalty * count_V + sampling.presence_penalty * (count_V > 0)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    return logits.masked_fill(~allowed(request, row, len(logits)), -math.inf)


def allowed(request: Request, row: list[int], vocab_size: int) -> torch.Tensor:
    """bool [V], what the grammar lets follow; everything if there is none, or the row has left it or ended."""
    matcher = request.grammar.matcher() if request.grammar else None
    for token in row[request.prompt_len :]:
        if matcher is None or matcher.has_ended or not matcher.advance(token):
            return torch.ones(vocab_size, dtype=torch.bool)
    return torch.ones(vocab_size, dtype=torch.bool) if matcher is None or matcher.has_ended else matcher.allowed()
