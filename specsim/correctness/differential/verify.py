"""The verify phase: the target's logits by budget, and the walk from the implementation's own logits.

An implementation whose logits are within the budget and whose choices follow from *them* is right, whatever it chose.
So a choice is never excused by the precision of the model, only by that of float32 arithmetic on probabilities.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from specsim.core.grammar import allowed_trees, stacked
from specsim.core.phases import VerifyInput, VerifyOutput
from specsim.correctness.differential.comparison import Comparison, Trio
from specsim.correctness.differential.distribution import RowDistribution
from specsim.correctness.differential.divergence import Mismatch
from specsim.correctness.differential.sampled_verify import compare_accepted
from specsim.correctness.differential.scene import Scene

if TYPE_CHECKING:
    from specsim.reference.request_tree import Tree

COUNTERS = ("num_accepted_drafts", "num_accepted_tokens")


@dataclass(frozen=True, slots=True)
class Walk:
    """The walk through one request's tree that the fast implementation reports."""

    tree: "Tree"
    distributions: tuple[RowDistribution, ...]
    uniforms: tuple[float, ...]  # one for each depth
    final_uniform: float
    nodes: tuple[int, ...]  # the reported path

    def children(self, depth: int) -> list[int]:
        """Children of the path's node at a depth that may be accepted at all."""
        return list(self.tree.children(self.nodes[depth])) if depth < self.tree.depth_limit else []

    def accepted(self, depth: int) -> int | None:
        return self.nodes[depth + 1] if depth + 1 < len(self.nodes) else None


def own_distributions(
    scene: Scene, verify_input: VerifyInput, logits_RV: torch.Tensor
) -> tuple[list, list[tuple[RowDistribution, ...]]]:
    """The trees of all requests, and the distribution of each of their nodes from these logits [B·N, V]."""
    from specsim.reference.request_tree import trees
    from specsim.reference.verify import node_logits

    grown = trees(scene.batch, verify_input, scene.config.length_limit)
    logits_BNV = logits_RV.unflatten(0, verify_input.draft_tokens.shape)
    batch = scene.batch
    pools = scene.pools.reference
    grammars = scene.columns.reference.engine.grammars
    allowed_BNV = stacked(allowed_trees(batch, verify_input, pools, grammars), batch.size)
    adjusted_BNV = node_logits(batch, verify_input, logits_RV, scene.config, pools, allowed_BNV)
    sampling = scene.batch.sampling
    return grown, [
        tuple(RowDistribution.of_own_logits(*rows, sampling, request) for rows in zip(raw_NV, adjusted_NV, strict=True))
        for request, (raw_NV, adjusted_NV) in enumerate(zip(logits_BNV, adjusted_BNV, strict=True))
    ]


def compare_logits(
    scene: Scene, request: int, tree: VerifyInput, outputs: Trio[VerifyOutput], check: Comparison
) -> None:
    """Rows of the target; a node at or beyond max_len has no slot, and its logits mean nothing."""
    rows = _rows(scene, request)
    live = tree.cache_locations[rows] >= 0
    check.close("target_logits", outputs.map(lambda output: output.target_logits[rows][live]))


def compare_walk(
    scene: Scene,
    request: int,
    tree: "Tree",
    distributions: tuple[RowDistribution, ...],
    outputs: Trio[VerifyOutput],
    check: Comparison,
    draft_prob_MV: torch.Tensor | None = None,
) -> None:
    """Compare path, tokens, counters and logprobs with those that follow from the implementation's own logits.

    draft_prob_MV: its draft distributions, where the verifier reads them.
    """
    from specsim.core.uniforms import accept_uniforms, final_uniforms

    seeds = scene.batch.seeds[request, None]
    ids = scene.batch.request_ids[request, None]
    lens = scene.batch.seq_lens[request, None]
    uniforms = tuple(accept_uniforms(seeds, ids, lens, scene.config.num_steps)[0].tolist())
    nodes = _path(scene, request, tree, outputs, check)
    walk = Walk(tree, distributions, uniforms, float(final_uniforms(seeds, ids, lens)[0]), nodes)
    tokens = [tree.tokens[node] for node in nodes[1:]]
    predict = outputs.fast.verdict.predict[_rows(scene, request)]
    bonus = int(predict[nodes[-1]])
    expected = torch.full_like(predict, -1)
    expected[list(nodes)] = torch.tensor([*tokens, bonus], dtype=predict.dtype)
    by_step = distributions[0].temperature == 0 or scene.config.verifier == "target_only"
    choose = _compare_greedy if distributions[0].temperature == 0 else _compare_sampled
    for depth, token in enumerate([*tokens, bonus]):
        if not 0 <= token < len(distributions[0].adjusted_V):
            raise Mismatch(
                "predict", int(outputs.reference.verdict.predict[_rows(scene, request)][nodes[depth]]), token
            )
        check.tally.decisions += choose(scene, walk, depth, token) if by_step else 0
    if not by_step:
        check.tally.decisions += compare_accepted(scene, request, tree, distributions, draft_prob_MV, nodes, bonus)
    check.same("predict", expected, predict)
    for name, count in zip(COUNTERS, (len(nodes) - 1, len(nodes)), strict=True):
        check.same(name, torch.tensor(count, dtype=torch.int32), getattr(outputs.fast.verdict, name)[request])
    _compare_logprobs(request, walk, [*tokens, bonus], outputs, check)


def _rows(scene: Scene, request: int) -> slice:
    num_nodes = scene.config.num_draft_tokens
    return slice(request * num_nodes, (request + 1) * num_nodes)


def _path(scene: Scene, request: int, tree: "Tree", outputs: Trio[VerifyOutput], check: Comparison) -> tuple[int, ...]:
    """The path in accept_index, if it is one: from the root, child by child, no deeper than is allowed, then -1."""
    row = outputs.fast.verdict.accept_index[request].tolist()
    first = _rows(scene, request).start
    path = tuple(node - first for node in row if node != -1)
    steps = all(0 < b < len(tree.parents) and tree.parents[b] == a for a, b in pairwise(path))
    is_path = path[:1] == (0,) and steps and len(path) <= max(tree.depth_limit, 0) + 1
    padded = [first + node for node in path] + [-1] * (len(row) - len(path))
    check.require(
        "accept_index", is_path and row == padded, outputs.reference.verdict.accept_index[request].tolist(), row
    )
    return path


def _compare_greedy(_scene: Scene, walk: Walk, depth: int, token: int) -> int:
    """The argmax, and if a child holds it the walk goes there. Returns the number of choices."""
    node = walk.nodes[depth]
    accepted = walk.accepted(depth)
    name = "predict" if accepted is None else "accept_index"
    walk.distributions[node].compare_argmax(name, token, node)
    holds = next((child for child in walk.children(depth) if walk.tree.tokens[child] == token), None)
    if holds != accepted:
        raise Mismatch("accept_index", holds, accepted, node)
    return 1


def _compare_sampled(scene: Scene, walk: Walk, depth: int, token: int) -> int:
    """Every child's uniform in turn, then the draw from what is left. Returns the number of choices."""
    node = walk.nodes[depth]
    accepted = walk.accepted(depth)
    children = walk.children(depth)
    distribution = walk.distributions[node]
    threshold = max(scene.config.threshold_acc, 1e-9)
    prob_V = distribution.prob()
    accumulated = 0.0
    weight_V = prob_V.clone()
    for choices, child in enumerate(children, start=1):
        child_prob = float(prob_V[walk.tree.tokens[child]])
        accumulated += child_prob
        short = min(walk.uniforms[depth] * threshold - accumulated, scene.config.threshold_single - child_prob)
        if short > distribution.slack if child == accepted else short < -distribution.slack:
            distribution.deny("accept_index", child if short <= 0 else None, accepted, node)
        if child == accepted:
            return choices
        weight_V[walk.tree.tokens[child]] = 0.0
    distribution.compare_draw("predict", weight_V if weight_V.sum() > 0 else prob_V, walk.final_uniform, token, node)
    return len(children) + 1


def _compare_logprobs(
    request: int, walk: Walk, tokens: list[int], outputs: Trio[VerifyOutput], check: Comparison
) -> None:
    """From the column's own logits by float32's rounding, 0 past the path."""
    fast = outputs.fast.verdict.logprobs[request]
    expected = torch.zeros(len(fast), dtype=torch.float64)
    pairs = list(zip(walk.nodes, tokens, strict=True))
    expected[: len(pairs)] = torch.tensor([walk.distributions[node].logprob(token) for node, token in pairs])
    allowed = max(walk.distributions[node].logprob_slack(walk.distributions[node].noise) for node, _ in pairs)
    check.within("logprobs", expected, fast, allowed)


def compare_verdict(scene: Scene, request: int, outputs: Trio[VerifyOutput], check: Comparison) -> None:
    """Whether all columns went the same way; logprobs then are comparable."""
    rows = _rows(scene, request)
    verdicts = outputs.map(
        lambda output: (output.verdict.accept_index[request].tolist(), output.verdict.predict[rows].tolist())
    )
    if not verdicts.fast == verdicts.exact == verdicts.reference:
        check.decided(False)
    error = (
        (outputs.fast.verdict.logprobs[request].double() - outputs.exact.verdict.logprobs[request].double()).abs().max()
    )
    check.tally.max_logprob_error = max(check.tally.max_logprob_error, float(error))


def compare_extend_input(request: int, outputs: Trio[VerifyOutput], check: Comparison) -> None:
    """The accepted rows; those past the path (`fixed`) mean nothing."""
    states = outputs.map(lambda output: output.draft_extend_input)
    starts = states.map(lambda state: state.row_starts)
    prefix = "draft_extend_input."
    sizes = starts.map(lambda starts: starts.diff()[request])
    check.same(f"{prefix}row_starts", sizes.reference, sizes.fast)
    counters = (*COUNTERS, "bonus_tokens", "seq_lens", "req_pool_indices")
    for name in counters:
        check.same(prefix + name, getattr(states.reference, name)[request], getattr(states.fast, name)[request])
    count = int(states.reference.num_accepted_tokens[request])
    first = starts.map(lambda starts: int(starts[request]))
    rows = first.map(lambda low: slice(low, low + count))
    for name in ("input_ids", "positions", "cache_locations"):
        found = getattr(states.fast, name)[rows.fast]
        check.same(prefix + name, getattr(states.reference, name)[rows.reference], found)
    check.close(f"{prefix}hidden", Trio(*(s.hidden[r] for s, r in zip(states, rows, strict=True))))
