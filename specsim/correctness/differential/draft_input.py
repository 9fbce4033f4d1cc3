"""Comparison of prefill and draft-extend: the next round's drafts and, after prefill, the first token."""

from typing import Any

import torch

from specsim.core.engine import Engine
from specsim.core.grammar import allowed_first
from specsim.core.phases import (
    AutoregressiveInput,
    Candidates,
    DraftExtendInput,
    DraftInput,
    PrefillOutput,
    VerifyInput,
)
from specsim.correctness.differential.comparison import FLOAT32_EPS, Trio, budget, present
from specsim.correctness.differential.distribution import RowDistribution, rounding
from specsim.correctness.differential.kv import compare_committed
from specsim.correctness.differential.ranking import (
    DraftRow,
    LogitsPair,
    Ranking,
    candidates_of,
    compare_row,
    log_scores,
)
from specsim.correctness.differential.step import ComparedRequest, ComparedStep

DRAFT_FIELDS = ("hidden", "topk_index", "topk_scores", "draft_prob")


def compare_all_drafts(request: ComparedRequest[Any], prefix: str) -> bool:
    """Compare the finished drafts depth by depth.

    A draft that rounding decided ends the comparison, as the rows of deeper modules read it.
    """
    for depth in range(request.config.num_steps):
        fields = {
            name: request.field(name).map(lambda entries, at=depth: None if entries is None else entries[at])
            for name in DRAFT_FIELDS
        }
        if _is_dropped(request, depth):
            for name in ("topk_index", "topk_scores"):
                request.check.same(f"{prefix}{name}", *(present(name, values) for values in fields[name][::2]))
        elif not _compare_depth(request, prefix, fields, depth):
            return False
    _compare_features(request)
    return True


def _compare_depth(request: ComparedRequest[Any], prefix: str, fields: dict[str, Trio[Any]], depth: int) -> bool:
    """Compare the drafts after one hidden state, ranked by the logits of exact's hidden, or drawn."""
    check = request.check
    hidden, tokens, scores = (
        fields[name].map(lambda entries, of=name: present(of, entries)) for name in DRAFT_FIELDS[:3]
    )
    check.close(f"{prefix}hidden", hidden)
    logits = draft_logits(request, hidden)
    lanes = range(request.config.topk)
    row = DraftRow(f"{prefix}topk_index", tokens, fields["draft_prob"], logits, request.end, depth, lanes)
    if not compare_row(request, row):
        return False
    values = scores.map(lambda entries: log_scores(entries, request.config.score))
    check.within(f"{prefix}topk_scores", values.exact, values.fast, logits.log_noise(request))
    return True


def _is_dropped(request: ComparedRequest[Any], depth: int) -> bool:
    """Check whether a depth's mask row stands at or beyond max_len, where it proposes nothing."""
    return depth > 0 and request.step.drafter.num_mask_rows > 0 and request.end + depth > request.config.length_limit


def draft_logits(request: ComparedRequest[Any], hidden: Trio[Any]) -> LogitsPair:
    """Compute the logits [1, draft V] of the drafts after a hidden state."""
    pairs = zip(request.step.implementations[:2], hidden[:2], strict=True)
    return LogitsPair(
        *(implementation.engine.drafter.logits(present("hidden", hidden_H)[None]) for implementation, hidden_H in pairs)
    )


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


def compare_product(request: ComparedRequest[VerifyInput], entered: ComparedRequest[Any]) -> bool:
    """Require the candidates that follow from the implementation's own drafts, and count the lanes as a choice."""
    check = request.check
    drafter = request.step.implementations.reference.engine.drafter
    draft_input = entered.states.fast.to("cpu").filter(torch.tensor([request.index]))
    expected = drafter.propose(request.batch, draft_input, request.step.pools.reference)
    product = candidates_of(request, Candidates)
    for name in ("parent_list", "tokens"):
        check.same(f"candidates.{name}", getattr(expected, name)[0], product.field(name).fast)
    config = request.config
    scores = log_scores(expected.scores[0], config.score)
    own_scores = log_scores(product.field("scores").fast, config.score)
    check.within("candidates.scores", scores, own_scores, 16 * FLOAT32_EPS)
    if expected.draft_prob is not None:
        check.same("draft_prob", expected.draft_prob[0], present("draft_prob", request.field("draft_prob").fast))
    return check.decided(product.field("parent_list").map(torch.Tensor.tolist))


def compare_prefill(request: ComparedRequest[PrefillOutput], logits: LogitsPair) -> bool:
    """Compare a request after a chunk of its prompt; logits: [B, V] after every chunk."""
    compare_committed(request, "target")
    if not _compare_first_token(request, logits):
        return False
    states = request.states.map(lambda state: state.draft_input)
    return _compare_draft_state(request.of(states), int(request.field("next_tokens").fast), "draft_input.")


def compare_draft_extend(request: ComparedRequest[DraftInput], rows: DraftExtendInput) -> bool:
    """Compare a request after draft-extend over these rows."""
    return _compare_draft_state(request, int(rows.bonus_tokens[request.index]))


def _compare_draft_state(request: ComparedRequest[DraftInput], bonus: int, prefix: str = "") -> bool:
    """Compare the draft KV and the state for the next round.

    The KV of modules that make all drafts depends on those drafts, which come first.
    """
    if not request.states.reference.has_all_drafts:
        compare_committed(request, "draft")
        return _compare_draft_input(request, bonus, prefix)
    is_same = _compare_draft_input(request, bonus, prefix) and compare_all_drafts(request, prefix)
    if is_same:
        compare_committed(request, "draft")
    return is_same


def _compare_draft_input(request: ComparedRequest[DraftInput], bonus: int, prefix: str) -> bool:
    """Compare the state for the next round, whose root is `bonus`."""
    bonus_tokens = request.field("bonus_tokens").fast
    request.check.same(f"{prefix}bonus_tokens", torch.tensor(bonus, dtype=torch.int32), bonus_tokens)
    if not isinstance(request.states.reference, AutoregressiveInput):
        return True
    return _compare_depth(request, prefix, {name: request.field(name) for name in DRAFT_FIELDS}, 0)


def prefill_logits(step: ComparedStep) -> LogitsPair:
    """Compute the logits [B, V] after each chunk; its KV is written again with the same values."""
    from specsim.reference.attention import prefill_metadata

    prefill = step.entered.reference
    logits = []
    for implementation in step.implementations[:2]:
        target = implementation.engine.target
        metadata = prefill_metadata(step.batch, prefill, implementation.pools)
        hidden_RH = target.forward(prefill.input_ids, metadata, implementation.pools.target, ()).hidden
        logits.append(target.logits(hidden_RH[prefill.last_rows]))
    return LogitsPair(*logits)


def _adjusted(request: ComparedRequest[Any], engine: Engine, logits_BV: torch.Tensor) -> torch.Tensor:
    """Compute the logits f64 [V] after penalties, bias and grammar mask."""
    from specsim.reference.sampling import adjust_logits

    batch = request.batch
    pools = request.step.pools.reference
    context = pools.token_ids[request.row, : request.length]
    allowed_1V = allowed_first(batch, pools, engine.grammars).get(0, (None,))
    return adjust_logits(logits_BV[request.index], context, int(batch.prompt_lens), batch.sampling, 0, allowed_1V[0])


def _compare_first_token(request: ComparedRequest[PrefillOutput], logits: LogitsPair) -> bool:
    """Compare the token after the chunk with exact's adjusted logits.


    Prefill does not return the logits of the implementation under test.
    """
    from specsim.core.uniforms import first_uniforms

    check = request.check
    batch = request.batch
    engine = request.step.implementations.reference.engine
    reference_V, exact_V = (_adjusted(request, engine, logits_BV) for logits_BV in logits)
    noise = max(budget(reference_V, exact_V, check.eps), rounding(exact_V))
    distribution = RowDistribution(exact_V, batch.sampling, noise)
    tokens = request.field("next_tokens").map(int)
    prompt_token = int(request.step.entered.reference.next_tokens[request.index])  # -1 where the token is sampled
    is_token = tokens.fast == prompt_token if prompt_token >= 0 else 0 <= tokens.fast < len(exact_V)
    check.require("next_tokens", is_token, tokens.reference if prompt_token < 0 else prompt_token, tokens.fast)
    is_same = True
    if prompt_token < 0 and distribution.temperature == 0:
        ranking = Ranking(reference_V, exact_V, noise)
        is_same = ranking.compare(check, "next_tokens", tokens.map(lambda token: [token]))
    elif prompt_token < 0:
        uniform = float(first_uniforms(batch.seeds, batch.request_ids, batch.seq_lens))
        is_drawn = distribution.compare_draw("next_tokens", distribution.prob(), uniform, tokens.fast, None)
        is_same = is_drawn and check.decided(tokens)
    if not is_same:
        return False
    expected = torch.tensor(distribution.logprob(tokens.fast), dtype=torch.float64)
    logprob = request.field("logprobs").fast
    check.within("logprobs", expected, logprob, distribution.logprob_slack(noise))
    check.note_logprob_error(abs(float(logprob.double() - expected)))
    return True
