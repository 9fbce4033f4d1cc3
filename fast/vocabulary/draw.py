"""A token from a row's law by inverse CDF: the group of tokens in which it lies, then the token."""

import torch
import triton
import triton.language as tl

from specsim.fast.vocabulary.distribution import Law, weight
from specsim.fast.vocabulary.summaries import LOWEST_RANK, num_groups, rank, weights_of

PER = 8  # groups that are read again at once


def workspace(law: Law, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `count` draws need beside the laws: masses f32 and numbers i32 of groups, [count, G]."""
    size, device = (count, law.maxima.shape[1]), law.maxima.device
    return torch.empty(size, dtype=torch.float32, device=device), torch.empty(size, dtype=torch.int32, device=device)


def groups_block(vocab_size: int) -> int:
    """Groups of a row as a block of draw."""
    return triton.next_power_of_2(num_groups(vocab_size))


# siblings: (tokens_ptr, next_sibling_ptr, first node of the rejected or -1, num_nodes), or None where there is no tree.


@triton.jit
def _residual(laws, row, siblings, tokens):
    """Weights of tokens at a row, 0 for those that siblings hold."""
    weights = weight(laws, row, tokens)
    if siblings is not None:
        tokens_ptr, next_sibling_ptr, node, num_nodes = siblings
        seen = 0
        while (node >= 0) & (node < num_nodes) & (seen < num_nodes):
            weights = tl.where(tokens == tl.load(tokens_ptr + node), 0.0, weights)
            node, seen = tl.load(next_sibling_ptr + node), seen + 1
    return weights


@triton.jit
def _group_masses(laws, row, siblings, space, GROUP: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr):
    """The residual's mass in every group [GROUPS]: the summary's, but for groups that a cut or a sibling touches."""
    _, _, maxima_ptr, sums_ptr, moments_ptr, lasts_ptr, vocab_size = laws
    masses_ptr, numbers_ptr = space
    groups, count = tl.arange(0, GROUPS), tl.cdiv(vocab_size, GROUP)
    mask = groups < count
    maxima = tl.load(maxima_ptr + row * count + groups, mask=mask, other=float("-inf"))
    sums = tl.load(sums_ptr + row * count + groups, mask=mask, other=0.0)
    masses = sums * weights_of(maxima, tl.load(moments_ptr + row * 4), tl.load(moments_ptr + row * 4 + 1))
    last_rank = tl.load(lasts_ptr + row * 3)
    is_cut = last_rank > LOWEST_RANK
    masses, touched = tl.where(is_cut, 0.0, masses), mask & is_cut & (rank(maxima) >= last_rank)
    if siblings is not None:
        tokens_ptr, next_sibling_ptr, node, num_nodes = siblings
        seen = 0
        while (node >= 0) & (node < num_nodes) & (seen < num_nodes):
            touched |= mask & (groups == tl.load(tokens_ptr + node) // GROUP)
            node, seen = tl.load(next_sibling_ptr + node), seen + 1
    size = tl.sum(touched.to(tl.int32), axis=0)
    if size > 0:
        tl.debug_barrier()  # the workspace may still be read as of an earlier call
        tl.store(numbers_ptr + tl.cumsum(touched.to(tl.int32), axis=0) - 1, groups, mask=touched)
        tl.store(masses_ptr + groups, masses, mask=mask)
        tl.debug_barrier()
        for start in range(0, size, PER):
            entries = start + tl.arange(0, PER)
            number = tl.load(numbers_ptr + entries, mask=entries < size, other=count)
            tokens = number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            own = tl.sum(_residual(laws, row, siblings, tokens), axis=1)
            tl.store(masses_ptr + number, own, mask=entries < size)
        tl.debug_barrier()
        masses = tl.load(masses_ptr + groups, mask=mask, other=0.0)
    return masses


@triton.jit
def group_at(masses, uniform, GROUPS: tl.constexpr):
    """The group of the share `uniform` of all masses: (group, mass before it, mass at the share)."""
    groups, cdf = tl.arange(0, GROUPS), tl.cumsum(masses, axis=0)
    bound = uniform * tl.max(cdf, axis=0)
    found = tl.min(tl.where((masses > 0) & (cdf > bound), groups, GROUPS), axis=0)
    last = tl.maximum(tl.max(tl.where(masses > 0, groups, -1), axis=0), 0)
    group = tl.where(found < GROUPS, found, last)  # a parallel scan may have its peak where there is no mass
    return group, tl.sum(tl.where(groups == group - 1, cdf, 0.0), axis=0), bound


@triton.jit
def token_at(tokens, weights, before, bound, vocab_size):
    """Of a group's tokens the first with weight at which the mass so far exceeds the bound."""
    first = tl.min(tl.where((weights > 0) & (before + tl.cumsum(weights, axis=0) > bound), tokens, vocab_size), axis=0)
    last = tl.maximum(tl.max(tl.where(weights > 0, tokens, -1), axis=0), 0)
    return tl.where(first < vocab_size, first, last)


@triton.jit
def draw(laws, row, siblings, uniform, space, GROUP: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr):
    """The first token with weight and cdf > uniform · cdf[last], under a row's law without the rejected siblings.

    Where they leave nothing the law is taken whole. space: pointers to this program's part of a workspace.
    """
    masses = _group_masses(laws, row, siblings, space, GROUP, GROUPS, PER)
    if siblings is not None:
        tokens_ptr, next_sibling_ptr, first, num_nodes = siblings
        if (first >= 0) & (tl.sum(masses, axis=0) == 0):
            first = tl.full((), -1, tl.int64)
            siblings = (tokens_ptr, next_sibling_ptr, first, num_nodes)
            masses = _group_masses(laws, row, siblings, space, GROUP, GROUPS, PER)
        siblings = (tokens_ptr, next_sibling_ptr, first, num_nodes)
    group, before, bound = group_at(masses, uniform, GROUPS)
    tokens = group * GROUP + tl.arange(0, GROUP)
    return token_at(tokens, _residual(laws, row, siblings, tokens), before, bound, laws[6])
