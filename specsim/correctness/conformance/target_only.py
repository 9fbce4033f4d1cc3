"""Cases of target-only sampling: uniforms in every region and on every edge, thresholds, empty residuals."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from specsim.correctness.conformance.contract import Call, KernelCase, integers, replaced, strided
from specsim.correctness.conformance.greedy import FLAT, Forest, grown

LOWEST = 2.0**-24
HIGHEST = 1 - 2.0**-24
Row = list[float]


def sampling_call(
    forest: Forest, prob_BNV: Tensor, uniforms_BW: Tensor, final_B: Tensor, single: float = 1.0, acc: float = 1.0
) -> Call:
    """Make one call; uniforms_BW has a uniform for each depth: the path's node gets it, other nodes get 1 - it."""
    from specsim.reference.acceptance import target_only
    from specsim.reference.tree import depths_of

    rows = zip(forest.trees, prob_BNV.double(), uniforms_BW.tolist(), final_B.tolist(), strict=True)
    walked = [target_only(tree, prob_NV, uniforms, final, single, acc) for tree, prob_NV, uniforms, final in rows]
    depths_BN = integers(map(depths_of, forest.parents)).view(forest.size)
    uniforms_BN = uniforms_BW.gather(1, depths_BN.clamp(max=uniforms_BW.shape[1] - 1))
    for uniforms_N, (path, _) in zip(uniforms_BN, walked, strict=True):
        is_unread_N = torch.ones_like(uniforms_N, dtype=torch.bool).index_fill(0, integers(path), False)
        uniforms_N[is_unread_N] = 1 - uniforms_N[is_unread_N]
    samples = uniforms_BN.float(), final_B.float(), prob_BNV.float(), torch.zeros_like(prob_BNV).float()
    return forest.call("verify_target_only", walked, *samples, single, acc, True)


def _grid(
    uniforms: Row, finals: Row, weights: list[Row], parents: list[int] = FLAT, most: int = 2, **thresholds: float
) -> Call:
    """Make a request for every choice of uniforms; weights: the distribution at each node."""
    return _requests(list(product(*[uniforms] * most, finals)), weights, parents, most, **thresholds)


def _requests(
    chosen: list[tuple[float, ...]], weights: list[Row], parents: list[int] = FLAT, most: int = 2, **thresholds: float
) -> Call:
    """Make a request for each of these uniforms, the final one last."""
    batch = len(chosen)
    tokens = [0, 1, 2, 3, 0, 2][: len(parents)]
    uniforms_BW = torch.tensor([[*draws[:-1], 0.5] for draws in chosen], dtype=torch.float64).view(batch, most + 1)
    final_B = torch.tensor([draws[-1] for draws in chosen], dtype=torch.float64)
    prob_BNV = torch.tensor(weights).expand(batch, -1, -1).contiguous()
    return sampling_call(
        Forest([parents] * batch, [tokens] * batch, most), prob_BNV, uniforms_BW, final_B, **thresholds
    )


_HALVES = [[0.125, 0.25, 0.125, 0.5], [0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]]
_PROBS = [_HALVES[node % 3] for node in range(6)]
_INSIDE = [0.1, 0.3, 0.7]  # a uniform in every region of these distributions


def _edges() -> Call:
    """Use uniforms equal to the children's cumulative mass, which accept, and the next above, which do not."""
    edges = [0.25, 0.375, 0.5, 0.625]
    uniforms = [LOWEST, *edges, *(edge + 2.0**-24 for edge in edges), HIGHEST]
    below = list(product((0.25, 0.5), uniforms))  # below the root's first child, and its second
    pairs = [*((uniform, LOWEST) for uniform in uniforms), *below]
    return _requests([(*pair, 0.4) for pair in pairs], _PROBS)


def _no_chance() -> Call:
    """Use drafts of probability zero, which are never accepted and never drawn."""
    return _grid([LOWEST, HIGHEST], [LOWEST, HIGHEST], [[0.5, 0.0, 0.0, 0.5]] * 6)


def _covered() -> Call:
    """Use children that hold all mass, with a float32 sum below the uniform: the whole distribution is drawn from.

    An implementation that divides by the sum first accepts the last child, which is right too.
    """
    weights = [0.0, 0.25, 0.75 - 2.0**-23, 0.0]
    finals = [0.1, 0.3, HIGHEST]
    normalised = [weight / sum(weights) for weight in weights]
    other = _grid([HIGHEST], finals, [normalised] * 3, [-1, 0, 0], 1)
    call = _grid([HIGHEST], finals, [weights] * 3, [-1, 0, 0], 1)
    return replace(call, alternatives=(other.expected,))


def _unvisited() -> Call:
    """Put NaN in the distributions of nodes that no walk reaches."""
    prob_NV = torch.tensor([_PROBS[0], [0.0, 0.0, 0.0, 1.0], *[[float("nan")] * 4] * 4])
    prob_NV[3] = torch.tensor(_PROBS[1])
    call = _grid([0.2], _INSIDE, prob_NV.nan_to_num(0.25).tolist())
    return replaced(call, target_probs=prob_NV.expand(len(_INSIDE), -1, -1).contiguous())


def _roots() -> Call:
    """Pad requests: the root has no child, so the bonus token comes from its whole distribution."""
    from specsim.reference.sampling import inverse_cdf

    call = _grid([0.2], _INSIDE, _PROBS)
    batch = len(_INSIDE)
    predicts = torch.full((batch, 6), -1, dtype=torch.int32)
    predicts[:, 0] = integers(inverse_cdf(torch.tensor(_PROBS[0]).double(), final) for final in _INSIDE)
    accept_index = torch.full((batch, 3), -1, dtype=torch.int32)
    accept_index[:, 0] = torch.arange(batch) * 6
    accept_token_num = torch.zeros(batch, dtype=torch.int32)
    expected = {"predicts": predicts.flatten(), "accept_index": accept_index, "accept_token_num": accept_token_num}
    none = torch.full((batch, 6), -1)
    return replace(replaced(call, retrive_next_token=none, retrive_next_sibling=none), expected=expected)


def _wide_vocabulary(vocab: int) -> Call:
    """Use probabilities in units of 2⁻¹⁶, whose float32 sums are exact in any order, and uniforms off their edges."""
    generator = torch.Generator().manual_seed(vocab)
    forest = grown(6, 3, 2, 7)
    unit = 2.0**-16
    tokens = torch.randint(vocab, (6, 7), generator=generator)
    tokens = [[(int(row[0]) + 3 * node) % vocab for node in range(7)] for row in tokens]
    counts = torch.multinomial(torch.ones(42, vocab) / vocab, 2**16, replacement=True, generator=generator)
    prob_BNV = torch.stack([torch.bincount(row, minlength=vocab) for row in counts]).view(6, 7, vocab).double() * unit
    uniforms = (torch.randint(2**16, (6, 4), generator=generator) + 0.5) * unit
    forest = Forest(forest.parents, tokens, 2)
    return sampling_call(forest, prob_BNV, uniforms[:, :3].double(), _off_edges(forest, prob_BNV, uniforms.double()))


def _off_edges(forest: Forest, prob_BNV: Tensor, uniforms: Tensor) -> Tensor:
    """Choose final uniforms in the middle of a token's mass, in the residual as in the whole distribution."""
    from specsim.reference.acceptance import target_only

    finals = []
    for tree, prob_NV, (*accepts, shift) in zip(forest.trees, prob_BNV, uniforms.tolist(), strict=True):
        for final in ((torch.arange(1, 2**10) - 0.5) / 2**10).roll(int(shift * 2**10)).tolist():
            near = (target_only(tree, prob_NV, accepts, final + step, 1, 1) for step in (-1e-5, 0, 1e-5))
            if len({bonus for _, bonus in near}) == 1:
                finals.append(final)
                break
    return torch.tensor(finals, dtype=torch.float64)


def _sampling_refusable(change: Callable[[Tensor], Tensor]) -> Call:
    call = _grid([0.3], _INSIDE, _PROBS)
    return replaced(call, target_probs=change(call.arguments["target_probs"]))


CASES = (
    KernelCase("verify_target_only", "every cell of the uniforms", lambda: _grid(_INSIDE, [0.1, 0.45, 0.9], _PROBS)),
    KernelCase("verify_target_only", "uniforms on the edges", _edges),
    KernelCase("verify_target_only", "drafts of probability zero", _no_chance),
    KernelCase("verify_target_only", "children that cover the vocabulary", _covered),
    KernelCase(
        "verify_target_only",
        "full depth: the bonus comes from the whole distribution",
        lambda: _grid([LOWEST], _INSIDE, [_PROBS[0]] * 3, [-1, 0, 1]),
    ),
    KernelCase(
        "verify_target_only", "rows shorter than the tree is deep", lambda: _grid(_INSIDE, _INSIDE, _PROBS, most=1)
    ),
    KernelCase("verify_target_only", "threshold_acc 1/2", lambda: _grid(_INSIDE, [0.3], _PROBS, acc=0.5)),
    KernelCase("verify_target_only", "threshold_acc 0", lambda: _grid(_INSIDE[1:], [0.3], _PROBS, acc=0.0)),
    KernelCase("verify_target_only", "threshold_single 1/4", lambda: _grid(_INSIDE, [0.3], _PROBS, single=0.25)),
    KernelCase("verify_target_only", "NaN at unreached nodes", _unvisited),
    KernelCase("verify_target_only", "padded requests", _roots),
    KernelCase("verify_target_only", "a vocabulary of 33", partial(_wide_vocabulary, 33)),
    KernelCase("verify_target_only", "a vocabulary of 2053", partial(_wide_vocabulary, 2053)),
    KernelCase(
        "verify_target_only",
        "no requests",
        lambda: sampling_call(Forest([], [], 2), torch.empty(0, 6, 4), torch.empty(0, 3), torch.empty(0)),
    ),
    KernelCase("verify_target_only", "distributions with gaps", partial(_sampling_refusable, strided), may_refuse=True),
    KernelCase(
        "verify_target_only", "distributions in float64", partial(_sampling_refusable, Tensor.double), may_refuse=True
    ),
)
