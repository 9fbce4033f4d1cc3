"""Small models whose laws are fractions, and every tree that a drafter may draw from them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

Law = tuple[Fraction, ...]
Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The law of the next token: one of a few rows of weights, by the tokens of the text before it and their places."""

    weights: tuple[tuple[int, ...], ...]

    def __call__(self, text: Text) -> Law:
        row = self.weights[sum((place + 1) * (token + 1) for place, token in enumerate(text)) % len(self.weights)]
        return tuple(Fraction(weight, sum(row)) for weight in row)

    @property
    def vocab_size(self) -> int:
        return len(self.weights[0])


@dataclass(frozen=True, slots=True)
class Certain:
    """The law of greedy decoding: all on a model's most probable token, the lowest of equals."""

    model: Model

    def __call__(self, text: Text) -> Law:
        law = self.model(text)
        return tuple(Fraction(token == law.index(max(law))) for token in range(len(law)))

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size


@dataclass(frozen=True, slots=True)
class Case:
    """A target, a drafter, and the shape of the tree: parents of the nodes, the root's -1, parents first.

    tokens: those of the nodes below the root where drafts are not sampled; None where they are, each from the drafter's
    law at its parent.
    """

    name: str
    target: Model | Certain
    draft: Model
    parents: tuple[int, ...]
    tokens: tuple[int, ...] | None = None

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
    """A drafted tree and how probable it is: tokens of every node (the root's plays no part), laws after every node."""

    prob: Fraction
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    target_NV: tuple[Law, ...]
    draft_NV: tuple[Law, ...]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def depth(self, node: int) -> int:
        return len(self.text(node))

    def text(self, node: int) -> Text:
        """The tokens of a node's path below the root."""
        return (*self.text(self.parents[node]), self.tokens[node]) if node else ()


def draws(case: Case) -> Iterator[Draw]:
    """Every tree that may be drafted."""
    drafted = itertools.product(range(case.draft.vocab_size), repeat=len(case.parents) - 1)
    for tokens in drafted if case.tokens is None else [case.tokens]:
        draw = Draw(Fraction(1), (0, *tokens), case.parents, (), ())
        texts = [draw.text(node) for node in range(len(case.parents))]
        laws = tuple(map(case.draft, texts))
        chances = (laws[parent][token] for parent, token in zip(case.parents[1:], tokens, strict=True))
        prob = math.prod(chances, start=Fraction(1)) if case.tokens is None else Fraction(1)
        if prob:
            yield Draw(prob, draw.tokens, case.parents, tuple(map(case.target, texts)), laws)


def text_prob(model: Model | Certain, text: Text, start: int = 0) -> Fraction:
    """The probability of a text from its token `start` on, given those before it."""
    return math.prod((model(text[:at])[text[at]] for at in range(start, len(text))), start=Fraction(1))


def texts(vocab_size: int, length: int) -> list[Text]:
    """All of that length."""
    return list(itertools.product(range(vocab_size), repeat=length))


def residual(law: Sequence[Fraction], draft_law: Sequence[Fraction]) -> Law:
    """relu(law - draft_law), the law itself where that is nothing; not normalised."""
    weights = tuple(max(prob - draft_prob, Fraction(0)) for prob, draft_prob in zip(law, draft_law, strict=True))
    return weights if any(weights) else tuple(law)
