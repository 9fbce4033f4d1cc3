"""Small models whose distributions are fractions, and every tree that a drafter may draw from them."""

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
        draft_NV = tuple(map(case.draft, texts))
        probs = (draft_NV[parent][token] for parent, token in zip(case.parents[1:], tokens, strict=True))
        prob = math.prod(probs, start=Fraction(1)) if case.tokens is None else Fraction(1)
        if prob:
            yield replace(draw, prob=prob, target_NV=tuple(map(case.target, texts)), draft_NV=draft_NV)


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
