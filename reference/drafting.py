"""Drafts after rows, the lanes of a draft phase, and EAGLE-2's expansion of them in each step (arXiv 2406.16858)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specsim.core.config import Score, SpecConfig
from specsim.core.phases import AutoregressiveInput, Batch, Candidates
from specsim.core.uniforms import draft_uniforms, token_noise
from specsim.reference.sampling import argmax, inverse_cdf, topk


class Parents(NamedTuple):
    """Rows after which drafts are made: nodes of one depth, the same number of each request."""

    logits: torch.Tensor  # [R, draft vocabulary]
    root_lens: torch.Tensor  # i64 [B], L of the drafts' round
    depth: int
    slots: torch.Tensor | None = None  # i64 [R], -1 for a dropped row; None: no row is dropped


class RowDrafts(NamedTuple):
    """Drafts after R rows."""

    topk_scores: torch.Tensor  # f32 [R, K], each draft's probability or its logarithm
    topk_index: torch.Tensor  # i64 [R, K], target ids
    draft_prob: torch.Tensor | None  # f32 [R, V], their distribution; None where verify does not read it


def draft_topk(
    logits_RV: torch.Tensor,
    k: int,
    d2t: torch.Tensor | None,
    slots_R: torch.Tensor | None = None,
    score: Score = "prob",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the best k tokens of each row by logit: (scores f32 [R, K], *target* ids i64 [R, K]).

    A score is softmax(logits), or log_softmax(logits) = logits - logsumexp(logits), which does not underflow. Ties go
    to the lower draft id; draft id i is target id i + d2t[i]. A row whose slot is -1 was dropped at the length limit
    and proposes ids 0..K-1 with probability 0, whose logarithm is -inf.
    """
    _, draft_ids = topk(logits_RV, k)
    softmax = torch.softmax if score == "prob" else torch.log_softmax
    topk_scores = softmax(logits_RV.double(), dim=-1).gather(-1, draft_ids).float()
    target_ids = draft_ids if d2t is None else draft_ids + d2t[draft_ids]
    if slots_R is None:
        return topk_scores, target_ids
    live_R1 = (slots_R >= 0)[:, None]
    impossible = 0.0 if score == "prob" else -torch.inf
    return torch.where(live_R1, topk_scores, impossible), torch.where(live_R1, target_ids, torch.arange(k))


def draft_distribution(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    d2t: torch.Tensor | None,
    slots_R: torch.Tensor | None,
    vocab_size: int,
) -> torch.Tensor:
    """Distribution q of sampled drafts, f32 [R, V]: softmax(logits / T) over the draft vocabulary, by *target* id.

    q is 0 for a token outside the draft vocabulary, and in a row whose temperature is 0 or whose slot is -1.
    """
    is_drawn_R = temperature_R > 0 if slots_R is None else (temperature_R > 0) & (slots_R >= 0)
    logits_RV = logits_RV.double() - logits_RV.double().max(-1, keepdim=True).values
    prob_RV = torch.softmax(logits_RV / torch.where(is_drawn_R, temperature_R, 1.0)[:, None], dim=-1)
    target_ids = torch.arange(logits_RV.shape[1]) + (0 if d2t is None else d2t)
    draft_prob_RV = torch.zeros(len(logits_RV), vocab_size, dtype=torch.float64)
    draft_prob_RV[:, target_ids] = torch.where(is_drawn_R[:, None], prob_RV, 0.0)
    return draft_prob_RV.float()


def sampled(
    best: tuple[torch.Tensor, torch.Tensor],
    draft_prob_RV: torch.Tensor,
    uniforms_RK: torch.Tensor | None,
    noise_RV: torch.Tensor | None = None,
    score: Score = "prob",
    is_distinct: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw drafts x ~ q: (scores f32 [R, K], x i64 [R, K]).

    Each draft has a uniform, or is argmax(log q + noise). A score is q(x), or log q(x). No x with q(x) = 0 is drawn. A
    row whose q is 0 or NaN keeps `best`, the result of draft_topk. Drafts drawn with uniforms may be equal, unless they
    are distinct.
    """
    best_scores, best_ids = best
    topk_scores = best_scores.clone()
    target_ids = best_ids.clone()
    for row, draft_prob_V in enumerate(draft_prob_RV):
        if draft_prob_V.sum() > 0:
            ids = []
            if uniforms_RK is not None:
                ids = drawn(draft_prob_V.double(), uniforms_RK[row].tolist(), is_distinct)
            elif noise_RV is not None:
                ids = [int(argmax(draft_prob_V.double().log() + noise_RV[row]))]
            target_ids[row] = torch.tensor(ids)
            topk_scores[row] = draft_prob_V[ids] if score == "prob" else draft_prob_V[ids].log()
    return topk_scores, target_ids


def drawn(draft_prob_V: torch.Tensor, uniforms: list[float], is_distinct: bool) -> list[int]:
    """Draw a draft from q with each uniform.

    Distinct drafts are drawn without replacement: x_i from q without x_1, ..., x_(i-1), normalised. Where that has no
    mass, as q has fewer tokens than drafts, x_i is drawn from q again, and verification rejects it.
    """
    ids: list[int] = []
    for uniform in uniforms:
        rest_V = draft_prob_V.clone()
        rest_V[ids if is_distinct else []] = 0.0
        ids.append(inverse_cdf(rest_V if bool(rest_V.sum() > 0) else draft_prob_V, uniform))
    return ids


def draft(
    batch: Batch, parents: Parents, count: int, d2t: torch.Tensor | None, config: SpecConfig, vocab_size: int
) -> RowDrafts:
    """Draft `count` children of every row: the best tokens, or those that a uniform each or shared noise draws."""
    logits_RV, root_lens, depth, slots_R = parents
    best = draft_topk(logits_RV, count, d2t, slots_R, config.score)
    if not config.is_sampled:
        return RowDrafts(*best, None)
    temperature_R = batch.sampling.temperature.repeat_interleave(len(logits_RV) // max(1, batch.size))
    draft_prob_RV = draft_distribution(logits_RV, temperature_R, d2t, slots_R, vocab_size)
    names = batch.seeds, batch.request_ids
    if config.verifier_kind.is_coupled:
        noise_RV = token_noise(*names, root_lens + depth + 1, vocab_size)
        return RowDrafts(*sampled(best, draft_prob_RV, None, noise_RV, config.score), None)
    uniforms_BK = draft_uniforms(*names, root_lens, depth, config.topk)
    is_distinct = config.verifier_kind.drafts == "distinct" and depth == 0  # deeper drafts have parents of their own
    drafts = sampled(best, draft_prob_RV, uniforms_BK.view(-1, count), score=config.score, is_distinct=is_distinct)
    return RowDrafts(*drafts, draft_prob_RV)


@dataclass(frozen=True, slots=True)
class Lanes:
    """State of a draft phase after I steps."""

    tokens: torch.Tensor  # i64 [B, K], each lane's last token, best lane first
    scores: torch.Tensor  # f32 [B, K]
    path: torch.Tensor  # i64 [B, K, I], lane that holds lane k's token of each step
    hidden: torch.Tensor  # [B, K, H]
    candidates: Candidates  # all proposed so far


def lane_ids(batch_size: int, k: int) -> torch.Tensor:
    """Each lane's own index, i64 [B, K, 1]."""
    return torch.arange(k)[None, :, None].expand(batch_size, k, 1)


def start_lanes(draft_input: AutoregressiveInput, config: SpecConfig) -> Lanes:
    """Begin with the root's children as lanes, each with the root's hidden state."""
    return lanes_of(draft_input.topk_index, draft_input.topk_scores, draft_input.hidden, config)


def lanes_of(tokens_BK: torch.Tensor, scores_BK: torch.Tensor, hidden_BH: torch.Tensor, config: SpecConfig) -> Lanes:
    """Begin lanes with these children of the root."""
    batch_size, k = tokens_BK.shape
    hidden_BKH = hidden_BH[:, None].expand(-1, k, -1)
    parent_list = torch.arange(-1, k if config.num_steps > 1 else 0).repeat(batch_size, 1)
    candidates = Candidates(tokens_BK, scores_BK, parent_list)
    return Lanes(tokens_BK, scores_BK, lane_ids(batch_size, k), hidden_BKH, candidates)


def child_scores(scores_BK: torch.Tensor, topk_scores_BKK: torch.Tensor, score: Score) -> torch.Tensor:
    """Scores of paths, f32 [B, K lanes, K children].

    A score is the product of p, or the sum of log p, along the path, at most the parent's.

    topk_scores_BKK: p, or log p, of the children alone.
    """
    scores_BK1 = scores_BK[:, :, None]
    children_BKK = scores_BK1 * topk_scores_BKK if score == "prob" else scores_BK1 + topk_scores_BKK
    return torch.minimum(children_BKK, scores_BK1)


def expand(
    lanes: Lanes,
    topk_scores_BKK: torch.Tensor,
    topk_index_BKK: torch.Tensor,
    hidden_BKH: torch.Tensor,
    config: SpecConfig,
) -> Lanes:
    """Add the lanes' children to the candidates, and make lanes of the K best, best first.

    A lane of sampled drafts has one child, its next token. hidden_BKH: states that the children were drafted from.
    """
    pool = lanes.candidates
    scores = child_scores(lanes.scores, topk_scores_BKK, config.score).flatten(1)
    tokens = topk_index_BKK.flatten(1)
    batch_size, k, num_children = topk_scores_BKK.shape
    chosen_BK = torch.arange(k).expand(batch_size, k) if config.is_sampled else topk(scores, k)[1]
    parents_BK1 = chosen_BK[..., None] // num_children
    path_BKI = lanes.path
    if config.draft_kv == "ancestor":
        path_BKI = path_BKI.gather(1, parents_BK1.expand_as(path_BKI))
    parent_list = pool.parent_list
    if parent_list.shape[1] < config.num_parents:  # the next lanes will have children
        parent_list = torch.cat([parent_list, pool.tokens.shape[1] + chosen_BK], dim=1)
    return Lanes(
        tokens=tokens.gather(1, chosen_BK),
        scores=scores.gather(1, chosen_BK),
        path=torch.cat([path_BKI, lane_ids(batch_size, k)], dim=-1),
        hidden=hidden_BKH.gather(1, parents_BK1.expand_as(hidden_BKH)),
        candidates=Candidates(torch.cat([pool.tokens, tokens], 1), torch.cat([pool.scores, scores], 1), parent_list),
    )
