"""The truth of speculative decoding: no KV cache, no tree mask, no pool; one full forward for every node's token path.

A round starts from tokens x_0..x_L; the last is its root, L its root_len. The drafter (EAGLE: arXiv 2401.15077 and
2503.01840) grows candidates below the root, and the best form a tree (EAGLE-2: arXiv 2406.16858). Walking down from the
root, the target's law of the next token accepts one child or none (target-only sampling; at temperature 0 the argmax),
and the walk ends with one more token, the bonus, drawn from what the law leaves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch

from specsim.config import InputError, SamplingParams, SpecConfig
from specsim.reference.oracle_forward import draft_forward, in_dtype, target_forward

Draw = Callable[[str, int, int], float]
Path = tuple[int, ...]


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
    """What stays the same while a request is decoded. drafter is None in plain decoding."""

    target: SimpleNamespace
    drafter: SimpleNamespace | None
    config: SpecConfig
    sampling: SamplingParams
    draw: Draw
    prompt_len: int
    max_len: int


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A considered token, the last of `path`. The last of the (token, hidden) `rows` proposed it and gave `hidden`."""

    path: Path
    score: float
    hidden: torch.Tensor | None
    rows: tuple[tuple[int, torch.Tensor], ...]


def generate(
    pair, prompt_ids: Sequence[int], config: SpecConfig, sampling: SamplingParams, draw: Draw, dtype=torch.float64
) -> OracleResult:
    """Decode one request. draw(stream, root_len, depth) returns its uniforms; models run in dtype, laws in float64."""
    target, prompt_len = in_dtype(pair.target, dtype), len(prompt_ids)
    drafter = None if pair.drafter is None or config.is_plain else in_dtype(pair.drafter, dtype)
    max_len = config.max_len or target.config.max_position_embeddings
    if not 0 < prompt_len < max_len:
        raise InputError("prompt length", prompt_len, f"1 to {max_len - 1}, one less than max_len")
    request = Request(target, drafter, config, sampling, draw, prompt_len, max_len)

    tokens, rounds = list(prompt_ids), []
    logits = next_logits(request, tokens, tokens)
    first = ranked(logits)[0]
    if sampling.temperature > 0:
        first = inverse_cdf(next_law(logits, sampling), draw("PREFILL", prompt_len - 1, 0))
    logprobs = [logprob(logits, first, sampling)]
    finish_reason = append(tokens, [first], request)
    while finish_reason is None:
        tree = select(draft(request, tokens), config.num_draft_tokens - 1) if drafter else []
        rounds.append(verify(request, tokens, tree))
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


def draft(request: Request, tokens: list[int]) -> list[Candidate]:
    """All K + (S-1)K² candidates: K below the root, then level by level K below each lane: the K best one level up."""
    target, config = request.target, request.config
    is_prob, feature_layers = config.score == "prob", request.drafter.config.feature_layers
    _, features_LF = target_forward(target.config, target.tensors, tokens[:-1], feature_layers)

    def propose(parent: Candidate, rows: tuple) -> list[Candidate]:
        hidden, ids, prob_K = None, range(config.topk), torch.zeros(config.topk)
        if len(features_LF) + len(rows) <= request.max_len:  # the last row stands below max_len
            token_ids = [*tokens[1:], *(token for token, _ in rows)]
            hidden, logits = draft_forward(request, token_ids, features_LF, [hidden for _, hidden in rows])
            ids, prob_K = draft_topk(request.drafter, logits, config.topk)
        scores = parent.score * prob_K if is_prob else parent.score + prob_K.log()
        scores = scores.clamp(max=parent.score).tolist()
        return [Candidate((*parent.path, token), score, hidden, rows) for token, score in zip(ids, scores, strict=True)]

    lanes = propose(Candidate((), 1.0 if is_prob else 0.0, None, ()), ())
    pool, lane_rows = list(lanes), [()] * config.topk
    for _ in range(config.num_steps - 1):
        before = lane_rows if config.draft_kv == "lane" else [node.rows for node in lanes]
        lane_rows = [(*rows, (node.path[-1], node.hidden)) for rows, node in zip(before, lanes, strict=True)]
        level = [child for rows, node in zip(lane_rows, lanes, strict=True) for child in propose(node, rows)]
        lanes = [level[i] for i in ranked(torch.tensor([child.score for child in level]))[: config.topk]]
        pool += level
    return pool


def draft_topk(drafter, logits: torch.Tensor, topk: int) -> tuple[list[int], torch.Tensor]:
    """The K likeliest draft tokens as target ids, and their float32 probabilities at temperature 1."""
    prob = logits.double().softmax(-1).float()
    draft_ids = ranked(logits)[:topk]
    offset = drafter.tensors.get("d2t", torch.zeros(len(prob), dtype=torch.int64))
    return [i + int(offset[i]) for i in draft_ids], prob[draft_ids]


def select(pool: list[Candidate], count: int) -> list[Candidate]:
    """The best candidates, in pool order. With a child comes its parent, which scores no less and stands before it."""
    return [pool[i] for i in sorted(ranked(torch.tensor([node.score for node in pool]))[:count])]


def verify(request: Request, tokens: list[int], tree: list[Candidate]) -> OracleRound:
    """Walk down to the first node none of whose children is accepted; a node deeper than max_len - 1 - L never is."""
    sampling, root_len, paths = request.sampling, len(tokens) - 1, [node.path for node in tree]
    path, logprobs, descends = (), [], True
    while descends:
        row = [*tokens, *path]
        logits = next_logits(request, row, row if request.config.penalties == "exact" else tokens)
        children = [p[-1] for p in paths if p[:-1] == path and len(p) <= request.max_len - 1 - root_len]
        if sampling.temperature == 0:
            token = ranked(logits)[0]
            descends = token in children
        else:
            prob_V = next_law(logits, sampling)
            coin = request.draw("ACCEPT", root_len, len(path)) if children else None
            token = accept(prob_V, children, coin, request.config)
            descends = token is not None
            token = token if descends else recover(prob_V, children, request.draw("FINAL", root_len, 0))
        path = (*path, token)
        logprobs.append(logprob(logits, token, sampling))
    return OracleRound(tuple(paths), tuple(node.score for node in tree), tokens[-1], root_len, path, tuple(logprobs))


def accept(prob_V: torch.Tensor, children: list[int], coin: float | None, config: SpecConfig) -> int | None:
    """The first child with coin ≤ p(children up to it) / threshold_acc or p(child) ≥ threshold_single."""
    mass = 0.0
    for child in children:
        mass += float(prob_V[child])
        if coin <= mass / max(config.threshold_acc, 1e-9) or float(prob_V[child]) >= config.threshold_single:
            return child
    return None


def recover(prob_V: torch.Tensor, rejected: list[int], coin: float) -> int:
    """A draw from p without the rejected children, or from p itself if nothing is left."""
    residual_V = prob_V.clone()
    residual_V[rejected] = 0.0
    return inverse_cdf(residual_V if residual_V.any() else prob_V, coin)


def next_logits(request: Request, row: list[int], counted: list[int]) -> torch.Tensor:
    """float64 logits [V] of the token after `row`, after the penalties for `counted` and the bias."""
    sampling = request.sampling
    logits = target_forward(request.target.config, request.target.tensors, row, ())[0][-1].double()
    seen, penalty = logits[counted], sampling.repetition_penalty
    logits[counted] = torch.where(seen > 0, seen / penalty, seen * penalty)
    count_V = torch.bincount(torch.tensor(counted[request.prompt_len :], dtype=torch.int64), minlength=len(logits))
    logits -= sampling.frequency_penalty * count_V + sampling.presence_penalty * (count_V > 0)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    return logits


def next_law(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The law [V] of the next token: softmax at the temperature, top-k, top-p, min-p, renormalised after each."""
    prob_V = (logits / sampling.temperature).softmax(-1)
    if sampling.top_k:
        prob_V = restricted(prob_V, ranked(prob_V)[: sampling.top_k])
    if sampling.top_p < 1:
        order = ranked(prob_V)
        before = [0.0, *prob_V[order].cumsum(0).tolist()[:-1]]
        prob_V = restricted(prob_V, [i for i, mass in zip(order, before, strict=True) if mass < sampling.top_p])
    if sampling.min_p:
        prob_V = restricted(prob_V, (prob_V >= sampling.min_p * prob_V.max()).nonzero().flatten().tolist())
    return prob_V


def restricted(prob_V: torch.Tensor, kept: list[int]) -> torch.Tensor:
    """The law of a token that is known to be one of `kept`."""
    kept_V = torch.zeros_like(prob_V)
    kept_V[kept] = prob_V[kept]
    return kept_V / kept_V.sum()


def logprob(logits: torch.Tensor, token: int, sampling: SamplingParams) -> float:
    """Log probability at the temperature (1 when greedy), filters left out."""
    return float((logits / (sampling.temperature or 1.0)).log_softmax(-1)[token])


def inverse_cdf(mass_V: torch.Tensor, uniform: float) -> int:
    """The first id that has mass and whose cumulative mass exceeds that share of the total."""
    cdf_V = mass_V.cumsum(0)
    return int(((cdf_V > uniform * cdf_V[-1]) & (mass_V > 0)).nonzero()[0])


def ranked(values: torch.Tensor) -> list[int]:
    """Indices from the largest value to the smallest; equals in ascending order."""
    return values.sort(descending=True, stable=True).indices.tolist()
