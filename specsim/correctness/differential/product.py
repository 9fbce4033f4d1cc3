"""Comparison of a state that holds all drafts: those of every depth, and the features that they came from."""

from typing import Any

import torch

from specsim.core.phases import VerifyInput
from specsim.correctness.differential.budget import FLOAT32_EPS
from specsim.correctness.differential.comparison import Trio, present
from specsim.correctness.differential.ranking import LogitsPair, compare_drafts, log_scores
from specsim.correctness.differential.sampled import DrawnRow, candidates_of, compare_draws
from specsim.correctness.differential.step import ComparedRequest


def compare_all_drafts(request: ComparedRequest[Any], prefix: str) -> None:
    """Compare the finished drafts depth by depth, each ranked by the logits of exact's hidden state, or drawn.

    A draft that rounding decided ends the comparison, as the rows of deeper modules read it.
    """
    check = request.check
    config = request.config
    for depth in range(config.num_steps):
        hidden, tokens, scores, draft_prob = (
            request.field(name).map(lambda entries, at=depth: None if entries is None else entries[at])
            for name in ("hidden", "topk_index", "topk_scores", "draft_prob")
        )
        if _is_dropped(request, depth):
            check.same(f"{prefix}topk_index", *(present("topk_index", values) for values in tokens[::2]))
            check.same(f"{prefix}topk_scores", *(present("topk_scores", values) for values in scores[::2]))
            continue
        hidden = hidden.map(lambda entries: present("hidden", entries))
        check.close(f"{prefix}hidden", hidden)
        logits = _logits(request, hidden)
        tokens = tokens.map(lambda entries: present("topk_index", entries))
        name = f"{prefix}topk_index"
        values = scores.map(lambda entries: log_scores(present("topk_scores", entries), config.score))
        if config.is_sampled:
            row = DrawnRow(name, tokens, draft_prob, logits, request.end, depth, range(config.topk))
            compare_draws(request, row)
        else:
            compare_drafts(request, name, tokens.map(lambda entries: entries[None]), logits)
        check.within(f"{prefix}topk_scores", values.exact, values.fast, logits.log_noise(request))
    _compare_features(request)


def _is_dropped(request: ComparedRequest[Any], depth: int) -> bool:
    """Check whether a depth's mask row stands at or beyond max_len, where it proposes nothing."""
    return depth > 0 and request.step.drafter.num_mask_rows > 0 and request.end + depth > request.config.length_limit


def _logits(request: ComparedRequest[Any], hidden: Trio[torch.Tensor]) -> LogitsPair:
    pairs = zip(request.step.implementations[:2], hidden[:2], strict=True)
    return LogitsPair(*(implementation.engine.drafter.logits(hidden_H[None]) for implementation, hidden_H in pairs))


def _compare_features(request: ComparedRequest[Any]) -> None:
    """Compare the target's features that are kept for rows to write again."""
    rings = request.step.pools.map(lambda pools: pools.recent)
    if rings.reference is None:
        return
    width = rings.reference.positions.shape[1]
    lookahead = request.step.implementations.reference.engine.drafter.lookahead
    entries = torch.arange(max(0, request.end - lookahead), request.end) % width
    features = rings.map(lambda ring: present("kept features", ring))
    positions = features.map(lambda ring: ring.positions[request.row].cpu()[entries])
    request.check.same("kept positions", positions.reference, positions.fast)
    request.check.close("kept features", features.map(lambda ring: ring.features[request.row].cpu()[entries]))


def compare_product(request: ComparedRequest[VerifyInput], entered: ComparedRequest[Any]) -> None:
    """Require the candidates that follow from the implementation's own drafts, and count the lanes as a choice."""
    check = request.check
    drafter = request.step.implementations.reference.engine.drafter
    draft_input = entered.states.fast.to("cpu").filter(torch.tensor([request.index]))
    expected = drafter.propose(request.batch, draft_input, request.step.pools.reference)
    product = candidates_of(request)
    for name in ("parent_list", "tokens"):
        check.same(f"candidates.{name}", getattr(expected, name)[0], product.field(name).fast)
    config = request.config
    scores = log_scores(expected.scores[0], config.score)
    own_scores = log_scores(product.field("scores").fast, config.score)
    check.within("candidates.scores", scores, own_scores, 16 * FLOAT32_EPS)
    if expected.draft_prob is not None:
        check.same("draft_prob", expected.draft_prob[0], present("draft_prob", request.field("draft_prob").fast))
    check.decided(product.field("parent_list").map(torch.Tensor.tolist))
