"""Drafts of the oracle: candidates below a round's root, and the tree of the best."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from specsim.core.config import Score
from specsim.core.token_drafter import Proposal, TreeLimits
from specsim.reference.oracle_distributions import inverse_cdf, ranked
from specsim.reference.oracle_forward import target_forward
from specsim.reference.oracle_request import OracleRequest

Path = tuple[int, ...]
Row = tuple[int, torch.Tensor]  # a drafted token, and the hidden state of the row that proposed it


@dataclass(frozen=True, slots=True, eq=False)
class DraftNode:
    """A drafted token, the last of its path.

    The root has neither token nor parent.
    """

    path: Path
    parent: "DraftNode | None"
    lane: int
    score: float
    draft_prob_V: torch.Tensor | None  # f64 [V], distribution q that it was drawn from, None where it was not drawn
    hidden: torch.Tensor | None  # [H], of the row that proposed it
    rows: tuple[Row, ...]  # of the drafter; the last proposed it

    @property
    def token(self) -> int:
        return self.path[-1]

    @property
    def proposal(self) -> torch.Tensor:
        """Distribution q of a draft that was drawn."""
        if self.draft_prob_V is None:
            raise ValueError("the draft was not drawn from a distribution")
        return self.draft_prob_V


# Runs a drafter over a request's tokens x_0..x_L, whose target features are given, and the rows after them: the last
# row's (hidden [H], draft logits), None where its position is at or beyond max_len.
LastRow = Callable[[OracleRequest, list[int], torch.Tensor, tuple[Row, ...]], tuple[torch.Tensor, torch.Tensor] | None]


def is_dropped(request: OracleRequest, features_LF: torch.Tensor, rows: tuple[Row, ...]) -> bool:
    """Check whether the last row's position is at or beyond max_len, where row p holds token p+1."""
    return len(features_LF) + len(rows) > request.max_len


def look_up(request: OracleRequest, tokens: list[int], root: DraftNode, depth: int) -> list[DraftNode]:
    """Make the candidates of a token drafter, from the tokens alone.

    A candidate counts at most its parent's score.
    """
    return proposed_nodes(request.drafter.propose(0, tokens, limits_of(request)), root)


def limits_of(request: OracleRequest) -> TreeLimits:
    """Limits of a request's tree."""
    config = request.config
    return TreeLimits(config.num_steps, config.num_draft_tokens - 1, config.topk)


def proposed_nodes(proposal: Proposal, root: DraftNode) -> list[DraftNode]:
    """Make the nodes of a proposal."""
    nodes: list[DraftNode] = []
    for token, index, score in zip(*proposal, strict=True):
        parent = nodes[index] if index >= 0 else root
        score = score if index < 0 else min(score, parent.score)
        nodes.append(DraftNode((*parent.path, token), parent, 0, score, None, None, ()))
    return nodes


def draft_lanes(request: OracleRequest, tokens: list[int], root: DraftNode, last_row: LastRow) -> list[DraftNode]:
    """Grow the candidates of a drafter that runs once in each step, level by level.

    Unsampled drafts: the K best tokens below the root and below each lane; the K best of a level are the next lanes, K
    + (S-1)K² candidates in all. Sampled drafts: K below the root and one below each lane, which is the next lane.
    """
    target = request.target
    config = request.config
    drafter = request.drafter
    _, features_LF = target_forward(target.config, target.tensors, tokens[:-1], drafter.config.feature_layers)

    def propose(parent: DraftNode, rows: tuple, lane: int, count: int) -> list[DraftNode]:
        """Propose `count` children of a node, the first of them in this lane."""
        hidden = None
        draft_prob_V = None
        ids = range(count)
        own_scores_K = torch.full((count,), 0.0 if config.score == "prob" else -torch.inf)
        if last := last_row(request, tokens, features_LF, rows):
            hidden, logits = last
            if request.draws_drafts:
                draft_prob_V = draft_distribution(request, drafter, logits)
                depth = len(parent.path)
                ids = drawn(request, draft_prob_V, len(tokens) - 1, depth, range(lane, lane + count))
                prob_K = draft_prob_V[ids].float()
                own_scores_K = prob_K if config.score == "prob" else prob_K.log()
            else:
                ids, own_scores_K = draft_topk(drafter, logits, count, config.score)
        scores = parent.score * own_scores_K if config.score == "prob" else parent.score + own_scores_K
        scores = scores.clamp(max=parent.score).tolist()
        return [
            DraftNode((*parent.path, token), parent, lane + i, scores[i], draft_prob_V, hidden, rows)
            for i, token in enumerate(ids)
        ]

    lanes = propose(root, (), 0, config.topk)
    pool = list(lanes)
    lane_rows: list[tuple] = [()] * config.topk
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


def draft_topk(
    drafter: SimpleNamespace, logits: torch.Tensor, count: int, score: Score
) -> tuple[list[int], torch.Tensor]:
    """Find the likeliest draft tokens: (target ids, their probabilities at temperature 1 or logarithms, float32)."""
    scores = (logits.double().softmax(-1) if score == "prob" else logits.double().log_softmax(-1)).float()
    draft_ids = ranked(logits)[:count]
    return target_ids(drafter, len(scores))[draft_ids].tolist(), scores[draft_ids]


def draft_distribution(request: OracleRequest, drafter: SimpleNamespace, logits: torch.Tensor) -> torch.Tensor:
    """Distribution q of drawn drafts by target id, [V]: softmax(logits / T), rounded to float32."""
    prob = (logits.double() / request.sampling.temperature).softmax(-1)
    draft_prob_V = torch.zeros(request.target.config.vocab_size, dtype=torch.float64)
    draft_prob_V[target_ids(drafter, len(prob))] = prob
    return draft_prob_V.float().double()


def target_ids(drafter: SimpleNamespace, count: int) -> torch.Tensor:
    """Target ids of the draft ids 0..count-1."""
    return torch.arange(count) + drafter.tensors.get("d2t", torch.zeros(count, dtype=torch.int64))


def drawn(request: OracleRequest, draft_prob_V: torch.Tensor, root_len: int, depth: int, lanes: range) -> list[int]:
    """Draw children of a node of that depth, each by its uniform or by the noise of the target's token.

    lanes: of the children. Distinct ones below the root are drawn from the tokens that are left; where none is left,
    from all.
    """
    kind = request.config.verifier_kind
    ids = []
    for lane in lanes:
        left_V = draft_prob_V.clone()
        left_V[ids if kind.drafts == "distinct" and depth == 0 else []] = 0.0
        if kind.is_coupled:
            ids.append(ranked(draft_prob_V.log() + request.draws.noise(root_len + depth + 1))[0])
        else:
            uniform = request.draws.uniform("DRAFT", root_len, depth, lane)
            ids.append(inverse_cdf(left_V if left_V.any() else draft_prob_V, uniform))
    return ids


def select(pool: list[DraftNode], count: int) -> list[DraftNode]:
    """Select the best candidates, in the candidates' order.

    A parent scores no less than its child and precedes it.
    """
    return [pool[i] for i in sorted(ranked(torch.tensor([node.score for node in pool]))[:count])]
