"""Decisions of a verifier on one request's tree: the comparison at each draft that it looked at, and its result."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specsim.core.config import SpecConfig
from specsim.core.rule import Tree
from specsim.core.verifiers import resolve
from specsim.explorer.recorder import RecordedStates
from specsim.explorer.tables import target_probs


class Decision(NamedTuple):
    """One draft that the verifier looked at."""

    node: int
    passes: bool
    reason: str  # the comparison, in numbers


@dataclass(frozen=True, slots=True)
class VerifierInput:
    """Numbers that the verifier of one request reads."""

    tree: Tree
    config: SpecConfig
    probs_NV: torch.Tensor  # f64, the target's distribution after each node
    draft_probs_MV: torch.Tensor | None  # f32, distribution of the children of each node that has some
    uniforms: list[float]  # by depth or by node
    final_uniform: float
    noise_WV: torch.Tensor | None = None  # shared by drafter and target
    is_greedy: bool = False
    other: str = ""  # name of what decided in place of the verifier: a rule or a schedule
    decisions: list[Decision] = field(default_factory=list)

    @classmethod
    def of(
        cls, states: RecordedStates, config: SpecConfig, row: int, probs_NV: torch.Tensor, other: str = ""
    ) -> "VerifierInput":
        """Read a request's numbers from a recorded round, and draw its uniforms again."""
        from specsim.reference.tree import trees
        from specsim.reference.verify import round_draws

        batch = states.batch.filter(torch.tensor([row]))
        (draws,) = round_draws(batch, config, probs_NV.shape[-1])
        draft_prob = states.verify_input.draft_prob
        return cls(
            tree=trees(states.batch, states.verify_input, config.length_limit)[row],
            config=config,
            probs_NV=probs_NV,
            draft_probs_MV=None if draft_prob is None else draft_prob[row].double(),
            uniforms=draws.uniforms,
            final_uniform=draws.final,
            noise_WV=draws.noise_WV,
            is_greedy=float(batch.sampling.temperature) == 0,
            other=other,
        )

    @property
    def verifier(self) -> str:
        """Name of what decides."""
        return self.other or ("greedy" if self.is_greedy else self.config.verifier)

    def p(self, node: int) -> float:
        """Target's probability of a draft."""
        return float(self.probs_NV[self.tree.parents[node], self.tree.tokens[node]])

    def q(self, node: int) -> float:
        """Drafter's probability of a sampled draft."""
        assert self.draft_probs_MV is not None
        return float(self.draft_probs_MV[self.tree.parents[node], self.tree.tokens[node]])


def decide(walk: VerifierInput) -> list[Decision]:
    """List the decisions of the setting's verifier; none where a rule or a schedule decides in its place."""
    if walk.other:
        return []
    return list(greedy(walk) if walk.is_greedy else resolve(walk.config.verifier_kind.decisions)(walk))


def decisions(states: RecordedStates, config: SpecConfig, row: int, other: str = "") -> list[Decision]:
    """List the decisions on one request of a recorded round."""
    return decide(VerifierInput.of(states, config, row, target_probs(states, config, row), other))


def few(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:.4g}"


def _down(walk: VerifierInput, try_child: Callable[[int], Decision]) -> Iterator[Decision]:
    """Try the children of each node in sibling order, from the root down the accepted path."""
    path = [0]
    while True:
        for child in walk.tree.acceptable_children(path):
            decision = try_child(child)
            yield decision
            if decision.passes:
                path.append(child)
                break
        else:
            return


def _equal(walk: VerifierInput, expected: list[int], texts: tuple[str, str]) -> Iterator[Decision]:
    """Compare each draft with the token expected after its parent; texts: of another token and of the same one."""

    def try_child(child: int) -> Decision:
        passes = walk.tree.tokens[child] == expected[walk.tree.parents[child]]
        return Decision(child, passes, f"p = {few(walk.p(child))}{texts[passes]}")

    return _down(walk, try_child)


def greedy(walk: VerifierInput) -> Iterator[Decision]:
    """Compare each draft with the target's most likely token."""
    from specsim.reference.sampling import argmax

    texts = (", not the target's most likely token", ", the target's most likely token")
    return _equal(walk, argmax(walk.probs_NV).tolist(), texts)


def gumbel(walk: VerifierInput) -> Iterator[Decision]:
    """Compare each draft with the token that the target draws with the drafter's noise."""
    from specsim.reference.sampling import argmax

    assert walk.noise_WV is not None
    depths = [max(0, len(walk.tree.path(node)) - 1) for node in range(len(walk.tree.tokens))]
    drawn = argmax(walk.probs_NV.log() + walk.noise_WV[depths]).tolist()
    text = "; with the drafter's noise the target draws"
    return _equal(walk, drawn, (f"{text} another token", f"{text} the same token"))


def target_only(walk: VerifierInput) -> Iterator[Decision]:
    """Compare a node's uniform with the target's probability of its children so far."""
    single = walk.config.threshold_single
    total = max(walk.config.threshold_acc, 1e-9)
    masses: dict[int, float] = {}  # by parent, of the children tried

    def try_child(child: int) -> Decision:
        parent = walk.tree.parents[child]
        masses[parent] = masses.get(parent, 0.0) + walk.p(child)
        u = walk.uniforms[len(walk.tree.path(parent)) - 1]
        mass = masses[parent] / total
        passes = u <= mass or walk.p(child) >= single
        sign = "≤" if u <= mass else ">"
        alone = f", but p = {few(walk.p(child))} ≥ {few(single)}" if passes and u > mass else ""
        return Decision(child, passes, f"u = {few(u)} {sign} {few(mass)}, p of the children up to this one{alone}")

    return _down(walk, try_child)


def multi_round(walk: VerifierInput) -> Iterator[Decision]:
    """Compare u · q with p, which is the residual distribution after a rejection; distinct drafts leave q then."""
    from specsim.reference.acceptance import residual, without

    assert walk.draft_probs_MV is not None
    draft_probs = dict(enumerate(walk.draft_probs_MV))  # by parent, q after the rejections so far
    remaining_probs = dict(enumerate(walk.probs_NV))  # by parent, p after the rejections so far
    rejected: set[int] = set()

    def try_child(child: int) -> Decision:
        parent = walk.tree.parents[child]
        token = walk.tree.tokens[child]
        p = float(remaining_probs[parent][token])
        q = float(draft_probs[parent][token])
        u = walk.uniforms[child]
        passes = q > 0 and u * q < p
        is_residual = parent in rejected
        if not passes:
            rejected.add(parent)
            rest_V = residual(remaining_probs[parent], draft_probs[parent])
            remaining_probs[parent] = rest_V / rest_V.sum()
            if walk.config.verifier_kind.drafts == "distinct":
                draft_probs[parent] = without(draft_probs[parent], token)
        text = _ratio(u, q, p, passes) if q > 0 else "q = 0: the drafter had fewer tokens than there are siblings"
        return Decision(child, passes, f"{text}, the residual probability" if is_residual else text)

    return _down(walk, try_child)


def _ratio(u: float, q: float, p: float, passes: bool) -> str:
    return f"u · q = {few(u)} · {few(q)} = {few(u * q)} {'<' if passes else '≥'} p = {few(p)}"


def rejection(walk: VerifierInput) -> Iterator[Decision]:
    """Compare u · q with p at each draft of the chain, up to the first rejection."""
    for node in walk.tree.chain():
        u = walk.uniforms[node - 1]
        passes = u * walk.q(node) < walk.p(node)
        yield Decision(node, passes, _ratio(u, walk.q(node), walk.p(node), passes))
        if not passes:
            return


def block(walk: VerifierInput) -> Iterator[Decision]:
    """Look at every prefix of the chain; the longest one that passes is accepted."""
    assert walk.draft_probs_MV is not None
    last = len(walk.tree.chain())
    w = 1.0
    for node in walk.tree.chain():
        p = w * walk.p(node)
        q = walk.q(node)
        w = p / q if p < q else 1.0
        u = walk.uniforms[node - 1]
        if node == last:
            passes = u < w
            yield Decision(node, passes, f"u = {few(u)} {'<' if passes else '≥'} w = {few(w)}")
            continue
        r = float((w * walk.probs_NV[node] - walk.draft_probs_MV[node]).clamp(min=0).sum())
        passes = u * (r + 1 - w) < r
        sign = "<" if passes else "≥"
        text = f"u · (r + 1 − w) = {few(u)} · {few(r + 1 - w)} {sign} r = {few(r)}, with w = {few(w)}"
        yield Decision(node, passes, text)


def traversal(walk: VerifierInput) -> Iterator[Decision]:
    """Compare each node's uniform with its weight, from the leaves up; the first path that passes is accepted."""
    assert walk.draft_probs_MV is not None
    draft_probs_MV = walk.draft_probs_MV

    def below(path: list[int], weight: float) -> Iterator[Decision]:
        node = path[-1]
        prob_V = walk.probs_NV[node]
        for child in walk.tree.acceptable_children(path):
            q = walk.q(child)
            if not q > 0:
                continue
            decision = None
            for decision in below([*path, child], min(1.0, weight * float(prob_V[walk.tree.tokens[child]]) / q)):
                yield decision
            if decision and decision.passes:
                return
            weight_V = (weight * prob_V - draft_probs_MV[node]).clamp(min=0)
            mass = float(weight_V.sum())
            prob_V = weight_V / mass if mass > 0 else prob_V
            weight = mass / (mass + 1 - weight) if mass > 0 else 0.0
        if node:
            u = walk.uniforms[node]
            yield Decision(node, u < weight, f"u = {few(u)} {'<' if u < weight else '≥'} w = {few(weight)}")

    return below([0], 1.0)


def typical(walk: VerifierInput) -> Iterator[Decision]:
    """Look at every child of a node that passes; the deepest that passes is accepted."""
    config = walk.config
    passed = {0}
    for node, parent in enumerate(walk.tree.parents):
        if parent not in passed or len(walk.tree.path(node)) - 1 > walk.tree.depth_limit:
            continue
        entropy = float(torch.special.entr(walk.probs_NV[parent]).sum())
        threshold = min(config.typical_epsilon, config.typical_delta * math.exp(-entropy))
        passes = walk.p(node) > threshold
        if passes:
            passed.add(node)
        yield Decision(node, passes, f"p = {few(walk.p(node))} {'>' if passes else '≤'} threshold {few(threshold)}")


def bonus_origin(walk: VerifierInput, path: list[int]) -> str:
    """Describe the origin of the token after the accepted path, to follow the words `the bonus token`."""
    after = f"the target's distribution after node {path[-1]}"
    u = f" with u = {few(walk.final_uniform)}"
    if walk.other:
        return f"is made with {walk.other}"
    if walk.is_greedy:
        return f"is the most likely token of {after}"
    kind = walk.config.verifier_kind
    if kind.is_coupled:
        return f"is drawn from {after}, with noise named by the token's position"
    children = list(walk.tree.acceptable_children(path))
    if kind.draws == "none" or not children:
        return f"is drawn from {after}{u}"
    if kind.drafts == "best":
        return f"is drawn from {after}, without the rejected drafts,{u}"
    scaled = "w · p" if kind.name in ("block", "traversal") else "p"
    return f"is drawn from the residual distribution after node {path[-1]}, max(0, {scaled} − q) normalised,{u}"
