"""Cases of rejection sampling of chains: certain results, and distributions of random ones."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from specsim.correctness.conformance.contract import Call, KernelCase, SampleDistribution, arguments, integers, replaced

ROWS = 4096  # draws from a distribution
BONUS = 9
_NAN = float("nan")
REGIONS = 8  # of a uniform; the distributions below have no breakpoint inside one

Rows = list[list[float]]


def chain_call(
    drafts: list[list[int]],
    prob: Rows,
    draft_prob: Rows | None,
    bonus: list[int],
    expected: torch.Tensor | SampleDistribution,
    temperatures: Sequence[float] = (1.0,),
) -> Call:
    """Make one call for these drafts of each request.

    prob, draft_prob: rows of all requests, one after the other. temperatures: one per request or one for all; 0 is
    greedy.
    """
    lengths = [len(chain) for chain in drafts]
    warmth = torch.tensor(temperatures).expand(len(drafts)).contiguous()
    metadata = SimpleNamespace(
        all_greedy=bool((warmth == 0).all()), all_random=bool((warmth > 0).all()), temperature=warmth, top_k=None,
        top_p=None, generators={},
    )  # fmt: skip
    width = len(prob[0]) if prob else 4
    rows = torch.tensor(prob, dtype=torch.float32).view(-1, width)
    draft_rows = None if draft_prob is None else torch.tensor(draft_prob, dtype=torch.float32).view(-1, width)
    values = (
        integers((token for chain in drafts for token in chain), torch.int32), lengths, max(lengths, default=2),
        integers(lengths).cumsum(0).int(), draft_rows, rows, integers(bonus, torch.int32)[:, None], metadata,
    )  # fmt: skip
    return Call(arguments("chain_rejection", *values), {"output_token_ids": expected})


def as_named(function: Callable[..., Any], call: Call) -> Call:
    """Pass logits as newer versions of vLLM do, if the parameter is named target_logits, else probabilities.

    Compiled functions may not name their parameters; they get probabilities.
    """
    try:
        names = list(signature(function).parameters)
    except (TypeError, ValueError):
        return call
    return replaced(call, target_probs=call.arguments["target_probs"].log()) if "target_logits" in names else call


def _table(rows: list[list[int]], width: int) -> torch.Tensor:
    return integers((row + [-1] * (width - len(row)) for row in rows), torch.int32).view(len(rows), width)


def _point(token: int, width: int = 4) -> list[float]:
    return [float(token == other) for other in range(width)]


_PROB = [0.125, 0.5, 0.375, 0.0]


def _sure(*temperatures: float) -> Call:
    """Chains of 3, 0, 1 and 2 drafts: all accepted, none to accept, one rejected, the second rejected.

    A draft is certainly accepted where its distribution is the target's, and rejected where the target's mass is on
    another token.
    """
    drafts = [[0, 1, 2], [], [3], [2, 0]]
    bonus = [7, 8, 9, 6]
    prob = [_PROB, _PROB, _PROB, _point(1), _PROB, _point(2)]
    draft_prob = [_PROB, _PROB, _PROB, _point(3), _PROB, _point(0)]
    if 0.0 in temperatures:  # greedy requests need only the most probable token
        prob, draft_prob = (list(map(_point, tokens)) for tokens in ((0, 1, 2, 1, 2, 2), (0, 1, 2, 3, 2, 0)))
    rows = [[0, 1, 2, 7], [8], [1], [2, 2]]
    return chain_call(drafts, prob, draft_prob, bonus, _table(rows, 4), temperatures)


def _sure_of_points(temperature: float) -> Call:
    """Make drafts without distributions, as prompt lookup gives them."""
    drafts = [[1, 1], [1, 0]]
    prob = [_point(1), _point(1), _point(1), _point(3)]
    return chain_call(drafts, prob, None, [5, 6], _table([[1, 1, 5], [1, 3]], 3), [temperature])


def _placeholders(temperature: float, with_distributions: bool) -> Call:
    """Chains with placeholders among certain drafts; the target's token there is the last, to which −1 might point."""
    drafts = [[-1], [0, -1, 1], [2]]
    target = [3, 0, 3, 1, 2]
    prob = [_point(token) for token in target]
    draft_prob = [_point(token) for token in (-1, 0, -1, 1, 2)] if with_distributions else None
    rows = [[3], [0, 3], [2, 9]]
    return chain_call(drafts, prob, draft_prob, [7, 8, 9], _table(rows, 4), [temperature])


def _sampled_placeholder() -> Call:
    """A placeholder, whose token is drawn from the target's whole distribution; drafts after it are not read."""
    outcomes = {(token, -1, -1): prob for token, prob in enumerate(_HALVES)}
    prob = [_HALVES, _UNIFORM] * ROWS
    return chain_call([[-1, 1]] * ROWS, prob, None, [BONUS] * ROWS, SampleDistribution(outcomes, ROWS))


def _with_nan(row: list[float], temperature: float) -> Call:
    """The middle request's first row has NaN: any token of the vocabulary, or its draft and what follows from it."""
    drafts = [[1], [2, 0], [3]]
    prob = [_point(1), row, _point(0), _point(1)]
    draft_prob = [_point(1), [0.25] * 4, _point(0), _point(3)]
    call, *others = (
        chain_call(drafts, prob, draft_prob, [5, 6, 7], _table([[1, 5], middle, [1]], 3), [temperature])
        for middle in ([0], [1], [2], [3], [2, 0, 6])
    )
    return replace(call, alternatives=tuple(other.expected for other in others))


def distribution_of(
    draft: list[int], prob: Rows, draft_prob: Rows, bonus: int, rows: int, num_regions: int = REGIONS
) -> SampleDistribution:
    """Enumerate the distribution of that number of rows: one call of the reference per region of the uniforms."""
    from specsim.core.rule import Tree
    from specsim.reference.acceptance import rejection
    from specsim.reference.tree import links

    parents = list(range(-1, len(draft)))
    tree = Tree([0, *draft], parents, *links(parents), len(draft))
    prob_NV = torch.tensor([*prob, prob[0]]).double()
    draft_prob_NV = torch.tensor(draft_prob).double()
    points = [(region + 0.5) / num_regions for region in range(num_regions)]
    counts = Counter()
    for *uniforms, final in product(points, repeat=len(draft) + 1):
        path, drawn = rejection(tree, prob_NV, draft_prob_NV, uniforms, final)
        accepted = draft[: len(path) - 1]
        last = bonus if len(accepted) == len(draft) else drawn
        counts[(*accepted, last, *[-1] * (len(draft) - len(accepted)))] += 1
    return SampleDistribution({row: count / counts.total() for row, count in counts.items()}, rows)


def sampled_call(draft: list[int], prob: Rows, draft_prob: Rows | None) -> Call:
    """ROWS requests with the same chain, distributions and bonus token."""
    points = [_point(token, len(prob[0])) for token in draft]
    expected = distribution_of(draft, prob, points if draft_prob is None else draft_prob, BONUS, ROWS)
    draft_rows = None if draft_prob is None else draft_prob * ROWS
    return chain_call([draft] * ROWS, prob * ROWS, draft_rows, [BONUS] * ROWS, expected)


_HALVES = [0.5, 0.25, 0.125, 0.125]
_UNIFORM = [0.25] * 4
_QUARTERS = [0.25, 0.25, 0.5, 0.0]


def _spread(weights: list[float], width: int = 1030) -> list[float]:
    """Place the same distribution on tokens at the edges of blocks."""
    prob_V = [0.0] * width
    for token, weight in zip((0, 511, 512, width - 1), weights, strict=True):
        prob_V[token] = weight
    return prob_V


def _wide() -> Call:
    """Use a vocabulary of 1030: tokens 0, 511, 512 and 1029 have mass; fewer rows keep it small."""
    prob = [_spread(_PROB)]
    draft_prob = [_spread(_HALVES)]
    count = ROWS // 4
    expected = distribution_of([0], prob, draft_prob, BONUS, count)
    return chain_call([[0]] * count, prob * count, draft_prob * count, [BONUS] * count, expected)


_SAMPLED = {
    "one draft that is with a quarter of its draft probability": partial(sampled_call, [0], [_PROB], [_HALVES]),
    "two drafts": partial(sampled_call, [0, 1], [_PROB, _UNIFORM], [_HALVES, [0.25, 0.5, 0.125, 0.125]]),
    "a draft that the target gives no mass": partial(sampled_call, [3, 0], [_PROB, _UNIFORM], [_HALVES, _UNIFORM]),
    "drafts without distributions": partial(sampled_call, [1, 2], [_PROB, _QUARTERS], None),
    "a vocabulary of 1030": _wide,
    "a placeholder": _sampled_placeholder,
}

CASES = tuple(
    KernelCase("chain_rejection", name, build, adapt=as_named)
    for name, build in {
        "chains of 3, 0, 1 and 2 drafts": partial(_sure, 1.0),
        "greedy chains": partial(_sure, 0.0),
        "greedy and sampled chains in one batch": partial(_sure, 0.0, 1.0, 1.0, 0.0),
        "drafts without distributions, certain": partial(_sure_of_points, 1.0),
        "greedy drafts without distributions": partial(_sure_of_points, 0.0),
        "placeholders": partial(_placeholders, 1.0, True),
        "placeholders without distributions": partial(_placeholders, 1.0, False),
        "greedy placeholders": partial(_placeholders, 0.0, True),
        **{f"distribution: {name}": build for name, build in _SAMPLED.items()},
        "no requests": lambda: chain_call([], [], [], [], _table([], 3)),
    }.items()
) + tuple(
    KernelCase("chain_rejection", name, build, adapt=as_named, may_refuse=True)
    for name, build in {
        "a row of NaN": partial(_with_nan, [_NAN] * 4, 1.0),
        "a row with one NaN": partial(_with_nan, [0.25, 0.25, 0.25, _NAN], 1.0),
        "a greedy row of NaN": partial(_with_nan, [_NAN] * 4, 0.0),
    }.items()
)
