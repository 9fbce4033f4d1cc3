"""Cases of the certificates: small vocabularies, drafters opposed to their targets, tokens without probability.

Except for the paper's own case the weights of a row sum to a power of two, so that float64 holds every probability;
where trees are given the weights are powers of two as well, so that a logit holds each.
"""

from dataclasses import replace

from specsim.correctness.exact.model import Certain, ExactCase, ExactModel

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

# max_len ends every path after one draft; its bonus token is drawn from p, not from the residual.
CUT_CHAIN = replace(PAPER, name=f"{PAPER.name}, 1 within max_len", depth_limit=1)
CUT_TREE = replace(GIVEN_TREE, name=f"{GIVEN_TREE.name}, 2 within max_len", depth_limit=1)

# A confidence head ends the drafts behind some tokens: a draft that exists still has the drafter's distribution.
STOPPED_CHAIN = replace(PAPER, name=f"{PAPER.name}, none behind one token", stops=(0,))
STOPPED_LANES = replace(LANES, name=f"{LANES.name}, none behind one token", stops=(1,))

CASES = {
    "best": (GIVEN_CHAIN, GIVEN_TREE, CUT_TREE),
    "sampled": (PAPER, CHAIN, BRIDGED, CUT_CHAIN, STOPPED_CHAIN),
    "one": (ONE,),
    "siblings": (PAIR, LANES, SQUARE, CUT_CHAIN, STOPPED_LANES),
}
# The fast implementation's lanes have one child a step; the interpreter takes a minute for 600 calls.
LAUNCHED = CASES | {"siblings": (PAIR, LANES, CUT_CHAIN, STOPPED_LANES)}
INTERPRETED = CASES | {"sampled": (PAPER, CUT_CHAIN, STOPPED_CHAIN), "siblings": (PAIR, CUT_CHAIN)}

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
}


def cases_of(cases: dict[str, tuple[ExactCase, ...]], drafts: str, is_greedy: bool) -> tuple[ExactCase, ...]:
    """Cases of a table for a kind of drafts; under greedy decoding the target is certain of each token."""
    if not is_greedy:
        return cases[drafts]
    return tuple(replace(case, target=Certain(case.target)) for case in cases[drafts])
