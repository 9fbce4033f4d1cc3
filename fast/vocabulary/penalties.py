"""Logits after penalties, bias and grammar mask.

Other requests' logits are read where the model wrote them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl

from specsim.core.phases import Batch, State
from specsim.core.pool import KVPool
from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_input,
    ceil_div,
    kernel,
    next_power_of_2,
    next_power_of_16,
    require_contiguous,
)

MOST_BIAS = tl.constexpr(1e18)  # beyond it distributions have no shape left, and (x - max) · log2(e) / T may overflow
COLUMNS = tl.constexpr(1024)  # tokens of a context that are counted at once
PROGRAMS = 264  # as many as a GPU runs at once; they share out the vocabularies of all requests that have any


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of a batch, the same number of rows for each request, and which of them are adjusted."""

    raw: torch.Tensor  # [R, V], the model's, in its dtype
    changed: torch.Tensor  # i32 [B], 1 where a request has penalties, a bias or a grammar, -1 where padded
    adjusted: torch.Tensor  # f32 [R, V], after penalties, bias and grammar mask where changed is 1, else unwritten

    @classmethod
    def unchanged(cls, logits_RV: torch.Tensor, size: int) -> Self:
        """Make the logits of `size` requests that are neither padded nor adjusted."""
        return cls(logits_RV, torch.zeros(size, dtype=torch.int32, device=logits_RV.device), logits_RV)

    @property
    def rows_per_request(self) -> int:
        return len(self.raw) // max(1, len(self.changed))


@dataclass(frozen=True, slots=True)
class Allowed(State):
    """Tokens that grammars allow after a batch's rows, as bits, which take an eighth of the transfer of bools."""

    bits: torch.Tensor  # i32 [B, N, ceil(V / 32)], token t is bit t % 32 of word t // 32
    is_constrained: torch.Tensor  # bool [B]; no bit of a request without a grammar is read

    @classmethod
    def empty(cls, size: int, num_rows: int, vocab_size: int, device: torch.device | str = "cpu") -> Self:
        """Allocate the rows of `size` requests with `num_rows` each, all unconstrained."""
        bits = torch.zeros(size, num_rows, ceil_div(vocab_size, 32), dtype=torch.int32, device=device)
        return cls(bits, torch.zeros(size, dtype=torch.bool, device=device))

    def load(self, rows: Mapping[int, torch.Tensor]) -> None:
        """Load masks, bool [N, V] on the host by index in the batch, and leave all other requests unconstrained."""
        self.is_constrained.copy_(torch.tensor([row in rows for row in range(len(self.is_constrained))]))
        for row, allowed_NV in rows.items():
            self.bits[row].copy_(_packed(allowed_NV))


def _packed(allowed_NV: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(allowed_NV, (0, -allowed_NV.shape[1] % 32)).numpy()
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


class TreePaths(NamedTuple):
    """Nodes of trees whose paths are counted, None for rows outside trees."""

    tokens_ptr: torch.Tensor | None  # i64 [B, N]
    parents_ptr: torch.Tensor | None  # i64 [B, N]


class Penalties(NamedTuple):
    """Penalties of requests as kernel arguments, f64 [B]."""

    repetition_ptr: torch.Tensor
    presence_ptr: torch.Tensor
    frequency_ptr: torch.Tensor


class AllowedTables(NamedTuple):
    """Allowed tokens as kernel arguments, None where no request is constrained."""

    bits_ptr: torch.Tensor | None
    is_constrained_ptr: torch.Tensor | None


@triton.jit
@no_type_check
def _output_counts(output, tree, root, offs_n, mask_n, offs_v, num_nodes, levels):
    """Add the counts of the nodes' paths to `output` [1, BLOCK], [NODES, BLOCK]."""
    counts = output + (offs_n * 0)[:, None]  # [NODES, BLOCK]
    if tree.tokens_ptr is not None:
        node = tl.where(mask_n, tl.where(levels > 1, offs_n, 0), -1).to(tl.int64)
        for _ in range(levels):
            mask_node = (node >= 0) & (node < num_nodes)
            token = tl.load(tree.tokens_ptr + root + node, mask=mask_node, other=-1)
            counts += (token[:, None] == offs_v[None, :]).to(tl.int32)
            node = tl.load(tree.parents_ptr + root + node, mask=mask_node, other=-1)
    return counts


@triton.jit
@no_type_check
def _context_counts(token_ids_ptr, length, prompt_len, first, BLOCK: tl.constexpr):
    """Count tokens first..first+BLOCK-1 in a request's columns, i32 [1, BLOCK]: (in the prompt, after it)."""
    in_prompt = tl.full((BLOCK,), 0, tl.int32)
    after = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, length, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        token = tl.load(token_ids_ptr + column, mask=column < length, other=-1) - first
        mask = (token >= 0) & (token < BLOCK)
        token = tl.minimum(tl.maximum(token, 0), BLOCK - 1).to(tl.int32)
        in_prompt += tl.histogram(token, BLOCK, mask=mask & (column < prompt_len))
        after += tl.histogram(token, BLOCK, mask=mask & (column >= prompt_len))
    return in_prompt[None, :], after[None, :]


class _OwnPenalties(NamedTuple):
    """Penalties of one or more requests inside a kernel."""

    repetition: tl.tensor  # f32
    presence: tl.tensor
    frequency: tl.tensor
    any: tl.tensor  # whether one of them changes a logit


@triton.jit
@no_type_check
def _penalties_of(penalties, request, mask):
    """Load the penalties of requests."""
    repetition = tl.load(penalties.repetition_ptr + request, mask=mask, other=1.0).to(tl.float32)
    presence = tl.load(penalties.presence_ptr + request, mask=mask, other=0.0).to(tl.float32)
    frequency = tl.load(penalties.frequency_ptr + request, mask=mask, other=0.0).to(tl.float32)
    return _OwnPenalties(repetition, presence, frequency, (repetition != 1) | (presence != 0) | (frequency != 0))


@kernel
@no_type_check
def _adjust(
    logits_ptr,
    adjusted_ptr,
    changed_ptr,
    token_ids_ptr,
    tree,
    rows_ptr,
    seq_lens_ptr,
    prompt_lens_ptr,
    penalties,
    is_biased_ptr,
    bias_ptr,
    allowed,
    stride_token_ids,
    num_nodes,
    levels,
    vocab_size,
    num_requests,
    REQUESTS: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Mark the requests whose logits change, and adjust those logits.

    All programs share out the parts of these requests' vocabularies.
    """
    offs_b = tl.arange(0, REQUESTS)
    mask_b = offs_b < num_requests
    offs_n = tl.arange(0, NODES)
    mask_n = offs_n < num_nodes
    parts = tl.cdiv(vocab_size, BLOCK)
    await_input(PDL)
    rows = tl.load(rows_ptr + offs_b, mask=mask_b, other=-1)
    changes = _penalties_of(penalties, offs_b, mask_b).any
    changes |= tl.load(is_biased_ptr + offs_b, mask=mask_b, other=0) != 0
    if allowed.bits_ptr is not None:
        changes |= tl.load(allowed.is_constrained_ptr + offs_b, mask=mask_b, other=0) != 0
    if tl.program_id(0) == 0:
        tl.store(changed_ptr + offs_b, tl.where(rows < 0, -1, changes.to(tl.int32)), mask=mask_b)
    changes &= rows >= 0
    places = tl.cumsum(changes.to(tl.int32))
    for unit in range(tl.program_id(0), tl.max(places) * parts, tl.num_programs(0)):
        request = tl.sum(tl.where(changes & (places == unit // parts + 1), offs_b, 0)).to(tl.int64)
        start = unit % parts * BLOCK
        row = tl.load(rows_ptr + request)
        row_penalties = _penalties_of(penalties, request, True)
        root = request * num_nodes
        offs_v = start + tl.arange(0, BLOCK)
        mask_v = offs_v < vocab_size
        mask = mask_n[:, None] & mask_v[None, :]
        offs = (root + offs_n)[:, None] * vocab_size + offs_v[None, :]
        logits = tl.load(logits_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        if row_penalties.any:
            length = tl.load(seq_lens_ptr + request)
            prompt_len = tl.load(prompt_lens_ptr + request)
            tokens = token_ids_ptr + row * stride_token_ids
            in_prompt, output = _context_counts(tokens, length, prompt_len, start, BLOCK)
            output = _output_counts(output, tree, root, offs_n, mask_n, offs_v, num_nodes, levels)
            repeated = tl.where(
                logits > 0, tl.div_rn(logits, row_penalties.repetition), logits * row_penalties.repetition
            )
            logits = tl.where(in_prompt + output > 0, repeated, logits)
            logits -= row_penalties.frequency * output.to(tl.float32) + tl.where(
                output > 0, row_penalties.presence, 0.0
            )
        if bias_ptr is not None:
            is_biased = tl.load(is_biased_ptr + request) != 0
            bias = tl.load(bias_ptr + request * vocab_size + offs_v, mask=mask_v & is_biased, other=0.0)
            logits += tl.minimum(tl.maximum(bias, -MOST_BIAS), MOST_BIAS).to(tl.float32)[None, :]
        if allowed.bits_ptr is not None:
            is_constrained = tl.load(allowed.is_constrained_ptr + request) != 0
            words = (root + offs_n)[:, None] * tl.cdiv(vocab_size, 32) + offs_v[None, :] // 32
            bits = tl.load(allowed.bits_ptr + words, mask=mask & is_constrained, other=-1) >> (offs_v % 32)[None, :]
            logits = tl.where((bits & 1) != 0, logits, float("-inf"))
        tl.store(adjusted_ptr + offs, logits, mask=mask)


def adjust_logits(
    batch: Batch,
    logits_RV: torch.Tensor,
    pools: KVPool,
    tree: TreePaths | None,
    levels: int,
    allowed: Allowed | None = None,
) -> Logits:
    """Apply penalties, bias and mask in one pass over the rows that have any.

    Penalties count the context and the tree's paths. levels: number of nodes of its path, from itself up, that a row
    counts after the request's tokens 0..L-1; 1 is only the root, for every row, and 0 none. allowed: tokens of the
    rows; None: all.
    """
    num_requests = batch.size
    num_rows, vocab_size = logits_RV.shape
    num_nodes = num_rows // max(1, num_requests)
    sampling = batch.sampling
    device = logits_RV.device
    nodes = next_power_of_2(max(1, num_nodes))
    require_contiguous(logits=logits_RV, logit_bias=sampling.logit_bias)
    block = min(max(64, next_power_of_2(vocab_size)), max(64, (2**18 if INTERPRETED else 2**12) // nodes))
    changed_B = torch.empty(num_requests, dtype=torch.int32, device=device)
    adjusted_RV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
    _adjust[(min(PROGRAMS, num_requests * ceil_div(vocab_size, block)),)](
        logits_ptr=logits_RV,
        adjusted_ptr=adjusted_RV,
        changed_ptr=changed_B,
        token_ids_ptr=pools.token_ids,
        tree=tree or TreePaths(None, None),
        rows_ptr=batch.req_pool_indices,
        seq_lens_ptr=batch.seq_lens,
        prompt_lens_ptr=batch.prompt_lens,
        penalties=Penalties(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        is_biased_ptr=sampling.is_biased,
        bias_ptr=sampling.logit_bias,
        allowed=AllowedTables(None, None) if allowed is None else AllowedTables(allowed.bits, allowed.is_constrained),
        stride_token_ids=pools.token_ids.stride(0),
        num_nodes=num_nodes,
        levels=levels,
        vocab_size=vocab_size,
        num_requests=num_requests,
        REQUESTS=next_power_of_16(num_requests),
        NODES=nodes,
        BLOCK=block,
    )
    return Logits(logits_RV, changed_B, adjusted_RV)
