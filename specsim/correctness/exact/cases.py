"""Cases of the certificates: small vocabularies, drafters opposed to their targets, tokens without probability.

Except for the paper's own case the weights of a row sum to a power of two, so that float64 holds every probability;
where trees are given the weights are powers of two as well, so that a logit holds each.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

Distribution = tuple[Fraction, ...]
Text = tuple[int, ...]
FAR = 2**10  # a depth that no tree reaches


@dataclass(frozen=True, slots=True)
class ExactModel:
    """Distribution of the next token: one of a few rows of weights, chosen by earlier tokens and places."""

    weights: tuple[tuple[int, ...], ...]  # [rows, V]

    def __call__(self, text: Text) -> Distribution:
        row = self.weights[sum((index + 1) * (token + 1) for index, token in enumerate(text)) % len(self.weights)]
        return tuple(Fraction(weight, sum(row)) for weight in row)

    @property
    def vocab_size(self) -> int:
        return len(self.weights[0])


@dataclass(frozen=True, slots=True)
class Certain:
    """Distribution of greedy decoding: all mass on a model's most probable token, the lowest of equals."""

    model: "ExactModel | Certain"

    def __call__(self, text: Text) -> Distribution:
        prob_V = self.model(text)
        return tuple(Fraction(token == prob_V.index(max(prob_V))) for token in range(len(prob_V)))

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size


@dataclass(frozen=True, slots=True)
class ExactCase:
    """A target, a drafter and the shape of the drafted tree."""

    name: str
    target: ExactModel | Certain
    draft: ExactModel
    parents: tuple[int, ...]  # [N], parents before children, the root's is -1
    tokens: tuple[int, ...] | None = None  # [N-1], tokens below the root; None: sampled at their parents
    depth_limit: int = FAR  # depth at which max_len ends every path
    stops: tuple[int, ...] = ()  # tokens of the first lane behind which no draft exists, as with a confidence head
    is_distinct: bool = False  # whether sampled siblings are drawn without replacement

    @property
    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def num_steps(self) -> int:
        return max(self.depths)


@dataclass(frozen=True, slots=True)
class Draw:
    """A drafted tree and the distributions at its nodes."""

    prob: Fraction  # probability of drafting it
    tokens: tuple[int, ...]  # [N], the root's is not used
    parents: tuple[int, ...]  # [N]
    target_NV: tuple[Distribution, ...]  # target's distribution after every node
    draft_NV: tuple[Distribution, ...]  # drafter's distribution after every node
    depth_limit: int  # depth at which max_len or the last draft ends every path
    drafted_depth: int = FAR  # nodes deeper than this are dead
    is_distinct: bool = False  # whether siblings are drawn without replacement

    def proposal(self, node: int) -> Distribution:
        """Distribution that a node was drawn from: q of its parent, without elder siblings if they are distinct."""
        draft_V = self.draft_NV[self.parents[node]]
        if not self.is_distinct:
            return draft_V
        elders = {self.tokens[elder] for elder in range(1, node) if self.parents[elder] == self.parents[node]}
        weights = [Fraction(0) if token in elders else prob for token, prob in enumerate(draft_V)]
        mass = sum(weights, Fraction(0))
        return tuple(weight / mass for weight in weights) if mass else draft_V

    def is_repeated(self, node: int) -> bool:
        """Check whether a distinct sibling repeats an elder's token, as q had no other left."""
        same = (elder for elder in range(1, node) if self.parents[elder] == self.parents[node])
        return self.is_distinct and any(self.tokens[elder] == self.tokens[node] for elder in same)

    @property
    def living_parents(self) -> tuple[int, ...]:
        """Parents of all nodes, -1 for dead ones."""
        depths = map(self.depth, range(len(self.parents)))
        return tuple(
            parent if depth <= self.drafted_depth else -1 for parent, depth in zip(self.parents, depths, strict=True)
        )

    def children(self, node: int) -> list[int]:
        """List the children that may be accepted: none of a node at the limit."""
        if self.depth(node) >= self.depth_limit:
            return []
        return [child for child, parent in enumerate(self.parents) if parent == node]

    @property
    def ends(self) -> list[int]:
        """List the nodes at which a path may end."""
        return [node for node in range(len(self.parents)) if self.depth(node) <= self.depth_limit]

    def depth(self, node: int) -> int:
        return len(self.text(node))

    def text(self, node: int) -> Text:
        """List the tokens of a node's path below the root."""
        return (*self.text(self.parents[node]), self.tokens[node]) if node else ()


def draws(case: ExactCase) -> Iterator[Draw]:
    """Yield every tree that may be drafted."""
    drafted = itertools.product(range(case.draft.vocab_size), repeat=len(case.parents) - 1)
    for tokens in drafted if case.tokens is None else [case.tokens]:
        draw = Draw(Fraction(1), (0, *tokens), case.parents, (), (), case.depth_limit)
        depth = _drafted_depth(draw, case.stops)
        draw = replace(draw, depth_limit=min(depth, case.depth_limit), drafted_depth=depth)
        texts = [draw.text(node) for node in range(len(case.parents))]
        draw = replace(draw, draft_NV=tuple(map(case.draft, texts)), is_distinct=case.is_distinct)
        probs = (draw.proposal(node)[draw.tokens[node]] for node in range(1, len(case.parents)))
        prob = math.prod(probs, start=Fraction(1)) if case.tokens is None else Fraction(1)
        if prob:
            yield replace(draw, prob=prob, target_NV=tuple(map(case.target, texts)))


def _drafted_depth(draw: Draw, stops: tuple[int, ...]) -> int:
    """Find the depth of the first lane's first token that ends all lanes."""
    node = 0
    while node in draw.parents:
        node = draw.parents.index(node)
        if draw.tokens[node] in stops:
            return draw.depth(node)
    return FAR


def text_prob(model: ExactModel | Certain, text: Text, start: int = 0) -> Fraction:
    """Compute the probability of a text from its token `start` on, given those before it."""
    return math.prod((model(text[:at])[text[at]] for at in range(start, len(text))), start=Fraction(1))


def texts(vocab_size: int, length: int) -> list[Text]:
    """List all texts of that length."""
    return list(itertools.product(range(vocab_size), repeat=length))


def residual(target_V: Sequence[Fraction], draft_V: Sequence[Fraction]) -> Distribution:
    """Compute relu(target - draft), or the target itself where that is 0 everywhere; not normalised."""
    weights = tuple(max(prob - draft_prob, Fraction(0)) for prob, draft_prob in zip(target_V, draft_V, strict=True))
    return weights if any(weights) else tuple(target_V)


_TARGET3 = ExactModel(((2, 1, 1), (0, 1, 3), (1, 2, 1), (2, 2, 0)))
_DRAFT3 = ExactModel(((1, 1, 2), (2, 1, 1), (1, 0, 1), (1, 2, 1)))
_TARGET4 = ExactModel(((4, 2, 1, 1), (0, 1, 1, 2), (1, 1, 4, 2), (2, 1, 0, 1), (1, 1, 1, 1)))
_DRAFT4 = ExactModel(((1, 1, 2, 4), (2, 1, 1, 0)))

PAPER = ExactCase(
    "2 tokens, a chain of 2 drafts", ExactModel(((1, 2),)), ExactModel(((2, 1),)), (-1, 0, 1)
)  # arXiv 2403.10444
CHAIN = ExactCase("3 tokens, a chain of 3 drafts", _TARGET3, _DRAFT3, (-1, 0, 1, 2))
ONE = ExactCase("4 tokens, 1 draft", _TARGET4, _DRAFT4, (-1, 0))
# A drafter with another vocabulary, whose distributions are over the tokens that the target has too.
_COMMON = ExactModel(((3, 1, 0), (1, 3, 0), (2, 2, 0)))
BRIDGED = ExactCase("3 tokens, a chain of 2 drafts from 2 of them", _TARGET3, _COMMON, (-1, 0, 1))
# The residual after the first sibling is below q for some tokens and above it for others, so that the second's uniform
# matters.
_LEAVING = ExactModel(((2, 5, 9), (1, 6, 9), (4, 8, 4), (0, 7, 9)))
_LEFT = ExactModel(((10, 4, 2), (9, 5, 2), (5, 3, 8)))
PAIR = ExactCase("3 tokens, 2 siblings", _LEAVING, _LEFT, (-1, 0, 0))
LANES = ExactCase("3 tokens, 2 lanes of 2 drafts", _LEAVING, _LEFT, (-1, 0, 0, 1, 2))
SQUARE = ExactCase(
    "2 tokens, 2 siblings, 2 children each",
    ExactModel(((1, 3), (3, 1), (1, 1))),
    ExactModel(((3, 1), (1, 3))),
    (-1, 0, 0, 1, 1, 2, 2),
)
GIVEN_CHAIN = ExactCase("4 tokens, a given chain of 3 drafts", _TARGET4, _DRAFT4, (-1, 0, 1, 2), (0, 3, 2))
GIVEN_TREE = ExactCase(
    "4 tokens, a given tree of 6 drafts", _TARGET4, _DRAFT4, (-1, 0, 0, 1, 1, 2, 2), (3, 0, 3, 1, 0, 3)
)
# Under the first token the draft has a probability of exactly 1/4; under the second a distribution of more entropy.
NEAR_TREE = ExactCase("4 tokens, a given tree of 4 drafts", _TARGET4, _DRAFT4, (-1, 0, 0, 1, 2), (0, 1, 1, 3))

# max_len ends every path after one draft; its bonus token is drawn from p, not from the residual.
CUT_CHAIN = replace(PAPER, name=f"{PAPER.name}, 1 within max_len", depth_limit=1)
CUT_TREE = replace(GIVEN_TREE, name=f"{GIVEN_TREE.name}, 2 within max_len", depth_limit=1)

# A confidence head ends the drafts behind some tokens: a draft that exists still has the drafter's distribution.
STOPPED_CHAIN = replace(PAPER, name=f"{PAPER.name}, none behind one token", stops=(0,))
STOPPED_LANES = replace(LANES, name=f"{LANES.name}, none behind one token", stops=(1,))


def _distinct(*cases: ExactCase) -> tuple[ExactCase, ...]:
    """Draw the siblings of cases without replacement."""
    return tuple(replace(case, name=f"{case.name}, without replacement", is_distinct=True) for case in cases)


# The drafter has two tokens for three siblings, so that the last one repeats the first.
_SCARCE = ExactCase("3 tokens, 3 siblings of 2 of them", _LEAVING, ExactModel(((12, 4, 0),)), (-1, 0, 0, 0))

CASES = {
    "best": (GIVEN_CHAIN, GIVEN_TREE, CUT_TREE, NEAR_TREE),
    "sampled": (PAPER, CHAIN, BRIDGED, CUT_CHAIN, STOPPED_CHAIN),
    "one": (ONE,),
    "siblings": (PAPER, PAIR, LANES, SQUARE, CUT_CHAIN, STOPPED_LANES),
    "distinct": _distinct(PAIR, LANES, SQUARE, STOPPED_LANES, _SCARCE),
}
# The fast implementation's lanes have one child a step; the interpreter takes a minute for 600 calls.
LAUNCHED = CASES | {
    "siblings": (PAPER, PAIR, LANES, CUT_CHAIN, STOPPED_LANES),
    "distinct": _distinct(PAIR, LANES, STOPPED_LANES, _SCARCE),
}
INTERPRETED = CASES | {
    "sampled": (PAPER, CUT_CHAIN, STOPPED_CHAIN),
    "siblings": (PAIR, CUT_CHAIN),
    "distinct": _distinct(PAIR, _SCARCE),
}

# Rules of a user, whose breakpoints nobody has derived, run on more cases, the smallest first.
_EVEN = ExactModel(((1, 3), (3, 1)))
_UNEVEN = ExactModel(((3, 1), (1, 1)))
_ONE = ExactModel(((0, 1, 0), (1, 0, 0)))
_TWO = ExactModel(((1, 0, 1), (0, 1, 3)))
_THREE = ExactModel(((1, 2, 1), (2, 1, 1), (0, 1, 1)))


def _sampled(name: str, parents: tuple[int, ...]) -> tuple[ExactCase, ...]:
    """Cases of sampled drafts: ordinary, equal, opposed and certain models."""
    return (
        ExactCase(f"2 tokens, {name}", _EVEN, _UNEVEN, parents),
        ExactCase(f"2 tokens, {name}, 0 within max_len", _EVEN, _UNEVEN, parents, depth_limit=0),
        ExactCase(f"3 tokens, {name}, target = drafter", _THREE, _THREE, parents),
        ExactCase(f"3 tokens, {name}, drafter = one token", _THREE, _ONE, parents),
        ExactCase(f"3 tokens, {name}, nothing in common", _TWO, _ONE, parents),
    )


RULE_CASES = {
    "best": (
        ExactCase("2 tokens, no draft", _EVEN, _UNEVEN, (-1,), ()),
        ExactCase("2 tokens, 1 given draft", _EVEN, _UNEVEN, (-1, 0), (0,)),
        ExactCase("2 tokens, both given", _EVEN, _UNEVEN, (-1, 0, 0), (1, 0)),
        ExactCase("2 tokens, a given chain of 2 drafts", _EVEN, _UNEVEN, (-1, 0, 1), (1, 0)),
        ExactCase("3 tokens, 3 given drafts", _TWO, _ONE, (-1, 0, 0, 2), (1, 2, 0)),
        *CASES["best"],
        replace(GIVEN_TREE, name=f"{GIVEN_TREE.name}, 0 within max_len", depth_limit=0),
    ),
    "sampled": (*_sampled("1 draft", (-1, 0)), *_sampled("a chain of 2", (-1, 0, 1)), *CASES["sampled"]),
    "siblings": (
        *_sampled("1 draft", (-1, 0)),
        *_sampled("2 siblings", (-1, 0, 0)),
        ExactCase("2 tokens, 3 siblings", _EVEN, _UNEVEN, (-1, 0, 0, 0)),
        *CASES["siblings"],
    ),
    "distinct": (
        *_distinct(*_sampled("2 siblings", (-1, 0, 0))),
        *_distinct(ExactCase("2 tokens, 3 siblings", _EVEN, _UNEVEN, (-1, 0, 0, 0))),
        *CASES["distinct"],
    ),
}


def cases_of(cases: dict[str, tuple[ExactCase, ...]], drafts: str, is_greedy: bool) -> tuple[ExactCase, ...]:
    """Cases of a table for a kind of drafts; under greedy decoding the target is certain of each token."""
    if not is_greedy:
        return cases[drafts]
    return tuple(replace(case, target=Certain(case.target)) for case in cases[drafts])
