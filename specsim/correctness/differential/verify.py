"""Comparison of the verify phase: the target's logits by budget, and the walk from the own logits.

An implementation is right if its logits are within the budget and its choices follow from *its own* logits.
So a choice is never excused by the model's precision, only by that of float32 arithmetic on probabilities.
"""

import torch

from specsim.core.grammar import allowed_trees, stacked
from specsim.core.phases import VerifyOutput
from specsim.core.verifiers import DEFAULT_VERIFIER
from specsim.correctness.differential.comparison import Mismatch, Trio
from specsim.correctness.differential.distribution import ReportedWalk, compare_accepted, reported_walk
from specsim.correctness.differential.kv import compare_committed
from specsim.correctness.differential.step import ComparedRequest, ComparedStep

COUNTERS = ("num_accepted_drafts", "num_accepted_tokens")


def adjusted_logits(step: ComparedStep) -> torch.Tensor:
    """Compute every node's logits under test after penalties, bias and grammar mask, f64 [B, N, V]."""
    from specsim.reference.verify import node_logits

    batch = step.batch
    tree = step.trees.reference
    reference = step.implementations.reference
    allowed = stacked(allowed_trees(batch, tree, reference.pools, reference.engine.grammars), batch.size)
    return node_logits(batch, tree, step.outputs["verify"].fast.target_logits, step.config, reference.pools, allowed)


def compare_verify(request: ComparedRequest[VerifyOutput], adjusted_BNV: torch.Tensor) -> bool:
    """Compare a request after the verify phase."""
    _compare_logits(request)
    if not (_compare_walk(reported_walk(request, adjusted_BNV[request.index])) and _compare_paths(request)):
        return False
    _compare_extend_input(request)
    compare_committed(request, "target")
    _note_round(request)
    return True


def _compare_logits(request: ComparedRequest[VerifyOutput]) -> None:
    """Compare the target's logits of all nodes with a slot; those at or beyond max_len have none."""
    live = request.step.trees.reference.cache_locations[request.nodes] >= 0
    logits = request.states.map(lambda output: output.target_logits[request.nodes][live])
    request.check.close("target_logits", logits)


def _compare_walk(walk: ReportedWalk) -> bool:
    """Compare path, tokens, counters and logprobs with those that follow from the implementation's own logits."""
    request = walk.request
    check = request.check
    verdict = request.states.fast.verdict
    predict = verdict.predict[request.nodes]
    is_greedy = request.temperature == 0
    has_rule = request.step.implementations.reference.engine.rule is not None
    by_step = is_greedy or (request.config.verifier == DEFAULT_VERIFIER and not has_rule)
    choose = _compare_greedy if is_greedy else _compare_sampled
    for depth, token in enumerate(walk.tokens):
        if not 0 <= token < len(walk.distributions[0].adjusted_V):
            expected = request.states.reference.verdict.predict[request.nodes]
            raise Mismatch("predict", int(expected[walk.nodes[depth]]), token)
        num_choices = choose(walk, depth) if by_step else 0
        if num_choices is None:
            return False
        check.tally.decisions += num_choices
    if not by_step:
        num_choices = compare_accepted(walk)
        if num_choices is None:
            return False
        check.tally.decisions += num_choices
    expected = torch.full_like(predict, -1)
    expected[list(walk.nodes)] = torch.tensor(walk.tokens, dtype=predict.dtype)
    check.same("predict", expected, predict)
    for name, count in zip(COUNTERS, (len(walk.nodes) - 1, len(walk.nodes)), strict=True):
        check.same(name, torch.tensor(count, dtype=torch.int32), getattr(verdict, name)[request.index])
    _compare_logprobs(walk)
    return True


def _compare_greedy(walk: ReportedWalk, depth: int) -> int:
    """Require the argmax, and the child that holds it where there is one. Returns the number of choices."""
    node = walk.nodes[depth]
    token = walk.tokens[depth]
    accepted = walk.accepted(depth)
    name = "predict" if accepted is None else "accept_index"
    walk.distributions[node].compare_argmax(name, token, node)
    holds = next((child for child in walk.children(depth) if walk.tree.tokens[child] == token), None)
    if holds != accepted:
        raise Mismatch("accept_index", holds, accepted, node)
    return 1


def _compare_sampled(walk: ReportedWalk, depth: int) -> int | None:
    """Compare every child's uniform in turn, then the draw from the residual.

    Returns the number of choices, None where rounding decided one.
    """
    from specsim.core.uniforms import accept_uniforms, final_uniforms

    batch = walk.request.batch
    config = walk.request.config
    names = (batch.seeds, batch.request_ids, batch.seq_lens)
    node = walk.nodes[depth]
    accepted = walk.accepted(depth)
    children = walk.children(depth)
    tokens = walk.tree.tokens
    distribution = walk.distributions[node]
    threshold = float(accept_uniforms(*names, config.num_steps)[0, depth]) * max(config.threshold_acc, 1e-9)
    prob_V = distribution.prob()
    accumulated = 0.0
    weight_V = prob_V.clone()
    for choices, child in enumerate(children, start=1):
        child_prob = float(prob_V[tokens[child]])
        accumulated += child_prob
        short = min(threshold - accumulated, config.threshold_single - child_prob)
        if short > distribution.slack if child == accepted else short < -distribution.slack:
            distribution.deny("accept_index", child if short <= 0 else None, accepted, node)
            return None
        if child == accepted:
            return choices
        weight_V[tokens[child]] = 0.0
    residual_V = weight_V if weight_V.sum() > 0 else prob_V
    final = float(final_uniforms(*names))
    is_same = distribution.compare_draw("predict", residual_V, final, walk.tokens[depth], node)
    return len(children) + 1 if is_same else None


def _compare_logprobs(walk: ReportedWalk) -> None:
    """Require the logprobs of the implementation's own logits up to float32 rounding, 0 past the path."""
    fast = walk.request.states.fast.verdict.logprobs[walk.request.index]
    expected = torch.zeros(len(fast), dtype=torch.float64)
    path = [walk.distributions[node] for node in walk.nodes]
    logprobs = [row.logprob(token) for row, token in zip(path, walk.tokens, strict=True)]
    expected[: len(path)] = torch.tensor(logprobs)
    allowed = max(row.logprob_slack(row.noise) for row in path)
    walk.request.check.within("logprobs", expected, fast, allowed)


def _compare_paths(request: ComparedRequest[VerifyOutput]) -> bool:
    """Stop where rounding changed the path; on equal paths note the largest logprob error."""
    verdicts = request.of(request.states.map(lambda output: output.verdict))
    paths = verdicts.states.map(
        lambda verdict: (verdict.accept_index[request.index].tolist(), verdict.predict[request.nodes].tolist())
    )
    if not paths.agree:
        return request.check.decided(paths)
    logprobs = verdicts.field("logprobs").map(torch.Tensor.double)
    request.check.note_logprob_error(float((logprobs.fast - logprobs.exact).abs().max()))
    return True


def _compare_extend_input(request: ComparedRequest[VerifyOutput]) -> None:
    """Compare the accepted rows; padding past the path (`fixed`) is not compared."""
    check = request.check
    inputs = request.of(request.states.map(lambda output: output.draft_extend_input))
    prefix = "draft_extend_input."
    sizes = inputs.states.map(lambda state: state.row_starts.diff()[request.index])
    check.same(f"{prefix}row_starts", sizes.reference, sizes.fast)
    for name in (*COUNTERS, "bonus_tokens", "seq_lens", "req_pool_indices"):
        values = inputs.field(name)
        check.same(prefix + name, values.reference, values.fast)
    for name in ("input_ids", "positions", "cache_locations", "hidden"):
        pairs = zip(inputs.states, inputs.field("row_starts"), strict=True)
        rows = Trio(*[getattr(state, name)[low:][: request.num_accepted_tokens] for state, low in pairs])
        if name == "hidden":
            check.close(prefix + name, rows)
        else:
            check.same(prefix + name, rows.reference, rows.fast)


def _note_round(request: ComparedRequest[VerifyOutput]) -> None:
    """Count the cases of the grid's coverage that a compared verify phase contains."""
    noted = request.check.tally.coverage
    config = request.config
    length = request.length
    page = config.page_size
    accepted = request.num_accepted_tokens - 1
    noted["rounds"] += 1
    noted[f"accepted {accepted}"] += 1
    noted["rejections"] += accepted < config.num_steps
    noted["dropped rows"] += int((request.step.trees.reference.cache_locations[request.nodes] < 0).sum())
    if page > 1:
        noted["page crossings"] += length // page != request.end // page
        noted["first column of a page"] += length % page == 0
        noted["last column of a page"] += length % page == page - 1
