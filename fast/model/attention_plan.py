"""Plan of an attention launch, and the merge of the parallel parts in which a request's keys are read."""

import functools
from dataclasses import dataclass
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_input,
    block_of,
    ceil_div,
    dot_type,
    has_warp_roles,
    kernel,
    nearest,
    next_power_of_2,
    next_power_of_16,
    stages_within,
)

MANY = 2**30  # more than any count here
MOST_MERGES = 4096  # programs


class AttentionTiling(NamedTuple):
    """Size and resources of a program."""

    block_m: int  # pairs of a row and a query head
    block_c: int  # keys of a tile
    stages: int  # tiles that are loaded at a time
    warps: int
    resident: int  # programs of a multiprocessor


def _tiling(pairs: int, block_d: int, dot: tl.dtype) -> AttentionTiling:
    """Choose the tiling measured fastest on an H200 for heads of 128 in two bytes.

    Wider heads get smaller tiles.
    """
    least = max(16, next_power_of_2(pairs))
    if INTERPRETED:
        return AttentionTiling(min(block_of(pairs, 64, max(128, block_d)), least), 128, 1, 4, 1)
    if dot.primitive_bitwidth > 16:
        return AttentionTiling(min(least, max(16, 4096 // max(block_d, 128))), 32, 2, 8, 1)
    if block_d > 128:
        return AttentionTiling(min(least, 64), 32, 2, 8, 1)
    if least >= 128:
        return AttentionTiling(128, 64, 3, 8, 1)
    return AttentionTiling(least, 64, 4 if least == 16 else 3, 4, 2)


class KeyPartition(NamedTuple):
    """Numbers of parts into which requests' keys are cut: at most one for every `share` keys."""

    share: int
    units: int  # bound on the parts of all requests, but for one of each request
    least: int  # parts of one request
    most: int  # parts of one request

    def most_units(self, num_requests: int) -> int:
        """Bound the number of parts of all requests, whatever their lengths."""
        return min(self.units + num_requests - 1, self.most * num_requests)


def _partition(programs: int, pairs: int, splits: int | None, invariant: bool) -> KeyPartition:
    """Choose a partition for `programs` units on the device, each with `pairs` pairs of a row and a query head."""
    if splits:
        return KeyPartition(1, MANY, splits, splits)
    if invariant:  # by a request's own keys alone; parts of many rows would fill the memory
        return KeyPartition(256, MANY, 1, max(1, min(16, 2048 // max(1, pairs))))
    return KeyPartition(128, max(1, programs), 1, MANY)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Programs of one launch, and the work of each."""

    group: int  # query heads of a key head
    pairs: int  # most pairs of a row and a query head of a group, of a request
    blocks: int  # programs that share these pairs
    units: int  # bound on the parts of all requests
    partition: KeyPartition | None  # None: the keys of every request are one part
    tiling: AttentionTiling
    is_pipelined: bool  # by specsim.fast.model.attention_pipeline
    block_b: int  # requests of an assignment; few values, since each is a compilation
    block_d: int
    dot: tl.dtype  # of a product's factors


def make_plan(
    query_RAD: torch.Tensor,
    keys: torch.Tensor,
    head_dim: int,
    metadata: AttentionMetadata,
    splits: int | None,
    invariant: bool,
    is_plain: bool = False,
) -> AttentionPlan:
    """Plan attention of rows over a layer's keys [slots, heads, ...], with values of head_dim channels.

    splits, invariant: see `attention`. is_plain: logits are q·k times a scale, in no window and with no sinks.
    """
    num_requests = len(metadata.num_extras)
    heads = keys.shape[1]
    group = query_RAD.shape[1] // heads
    pairs = metadata.max_rows * group
    block_d = max(16, next_power_of_2(head_dim))
    dot = dot_type(query_RAD.dtype, query_RAD.dtype if keys.itemsize == 1 else keys.dtype)  # fp8 widens
    is_pipelined = (
        is_plain
        and metadata.extras_are_rows
        and next_power_of_2(pairs) >= 128
        and head_dim in (64, 128)
        and keys.dtype == query_RAD.dtype
        and keys.itemsize == 2
        and has_warp_roles()
    )
    if is_pipelined:
        tiling = AttentionTiling(128, 128, 768 // head_dim, 4, 1)
    else:
        tiling = _tiling(64 if invariant and not metadata.has_equal_rows else pairs, block_d, dot)
        tile_bytes = tiling.block_c * block_d * dot.primitive_bitwidth // 8
        stages = stages_within(tiling.stages, 2 * tile_bytes, spare=tiling.block_m * block_d * 2)
        tiling = tiling._replace(stages=stages)
    blocks = ceil_div(pairs, tiling.block_m)
    programs = _multiprocessors(query_RAD.device) * tiling.resident // max(1, heads * blocks)
    partition = _partition(programs, pairs if metadata.has_equal_rows else MANY, splits, invariant)
    units = partition.most_units(num_requests)
    return AttentionPlan(
        group=group,
        pairs=pairs,
        blocks=blocks,
        units=units,
        partition=None if units == num_requests else partition,
        tiling=tiling,
        is_pipelined=is_pipelined,
        block_b=next_power_of_16(num_requests),
        block_d=block_d,
        dot=dot,
    )


class Assignment(NamedTuple):
    """A unit's work, inside a kernel."""

    request: tl.tensor
    split: tl.tensor  # the part
    num_splits: tl.tensor  # parts of the request
    first_part: tl.tensor  # the request's first part among those that are kept
    key_len: tl.tensor  # keys of the request's prefix


@triton.jit
@no_type_check
def assignment(offs, unit, metadata_ptrs, window, num_requests, partition):
    """Assign a part of a request to a unit.

    A unit past the last one gets a request that does not exist. A request has one part for every `share` of its keys,
    or for more keys where the parts of all requests would exceed `units`. It has at least `least` and at most `most`
    parts. offs: numbers from 0, at least num_requests.
    """
    mask = offs < num_requests
    length = tl.load(metadata_ptrs.key_lens + offs, mask=mask, other=0)
    work = tl.minimum(length, window) + tl.load(metadata_ptrs.num_extras + offs, mask=mask, other=0)
    share = tl.maximum(partition.share, tl.cdiv(tl.sum(work, axis=0), partition.units))
    splits = tl.where(mask, tl.minimum(tl.maximum(work // share, partition.least), partition.most), 0)
    ends = tl.cumsum(splits, axis=0)
    request = tl.sum((ends <= unit).to(tl.int32), axis=0)
    first_part = tl.sum(tl.where((offs < request) & (splits > 1), splits, 0), axis=0)
    is_request = offs == request
    num_splits = tl.sum(tl.where(is_request, splits, 0), axis=0)
    split = unit - tl.sum(tl.where(is_request, ends - splits, 0), axis=0)
    return Assignment(request, split, num_splits, first_part, tl.sum(tl.where(is_request, length, 0), axis=0))


@triton.jit
@no_type_check
def tiles_of(split, num_splits, first_tile, num_tiles):
    """Compute the tiles of one of num_splits parts, (first, end), whose counts differ by at most one."""
    least = num_tiles // num_splits
    rest = num_tiles - least * num_splits
    low_tile = first_tile + split * least + tl.minimum(split, rest)
    return low_tile, low_tile + least + (split < rest).to(tl.int32)


class AttentionParts(NamedTuple):
    """Partial results of requests whose keys are read in several parts."""

    acc: torch.Tensor  # f32 [parts, D], weighted sums of values of every part, head and pair of a row and a query head
    stats: torch.Tensor  # f32 [parts, 2], the largest logit and the sum of weights
    spans: torch.Tensor  # i32 [B, 2], a request's first part and its number of parts

    @classmethod
    def empty(cls, out: torch.Tensor, plan: AttentionPlan, num_requests: int) -> Self:
        """Allocate the parts of results [R, A, D]."""
        count = plan.units * plan.pairs * (out.shape[1] // plan.group)
        acc = out.new_empty(count, out.shape[2], dtype=torch.float32)
        return cls(acc, acc.new_empty(count, 2), acc.new_empty(num_requests, 2, dtype=torch.int32))


@triton.jit
@no_type_check
def store_part(parts_ptrs, first, acc, top, total, mask, mask_d, D: tl.constexpr):
    """Store a part's results of a block of pairs, [BLOCK_M] and [BLOCK_M, BLOCK_D], for the merge."""
    acc_ptr = parts_ptrs.acc + first * D
    stats_ptr = parts_ptrs.stats + 2 * first
    pair = tl.arange(0, acc.shape[0])
    tl.store(acc_ptr + pair[:, None] * D + tl.arange(0, acc.shape[1])[None, :], acc, mask=mask_d)
    tl.store(stats_ptr + 2 * pair, top, mask=mask)
    tl.store(stats_ptr + 2 * pair + 1, total, mask=mask)


@kernel
@no_type_check
def _merge_kernel(
    out_ptr,
    parts_ptrs,
    row_starts_ptr,
    pairs,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of every row and head, always in order, for requests with several parts."""
    await_input(PDL)
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    request = tl.program_id(1).to(tl.int64)
    first_part = tl.load(parts_ptrs.spans + 2 * request)
    num_splits = tl.load(parts_ptrs.spans + 2 * request + 1)
    low = tl.load(row_starts_ptr + request)
    high = tl.load(row_starts_ptr + request + 1)
    if num_splits == 1:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    for start in range(tl.program_id(2) * BLOCK_R, pairs, tl.num_programs(2) * BLOCK_R):
        pair = start + tl.arange(0, BLOCK_R)
        row = low + pair // GROUP
        mask = row < high
        total = tl.zeros([BLOCK_R], tl.float32)
        top = tl.full([BLOCK_R], float("-inf"), tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for first in range(0, num_splits, BLOCK_S):
            split = first + tl.arange(0, BLOCK_S)
            part = ((first_part + split).to(tl.int64)[None, :] * heads + head) * pairs + pair[:, None]
            mask_s = mask[:, None] & (split < num_splits)[None, :]
            part_top = tl.load(parts_ptrs.stats + 2 * part, mask=mask_s, other=float("-inf"))
            part_total = tl.load(parts_ptrs.stats + 2 * part + 1, mask=mask_s, other=0.0)
            mask_p = mask_s[:, :, None] & mask_d[None, None, :]
            part_ptr = parts_ptrs.acc + part[:, :, None] * D + offs_d[None, None, :]
            parts = tl.load(part_ptr, mask=mask_p, other=0.0)  # [BLOCK_R, BLOCK_S, BLOCK_D]
            higher = tl.maximum(top, tl.max(part_top, axis=1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(part_top - shift[:, None])
            before = tl.exp2(top - shift)
            acc = acc * before[:, None] + tl.sum(parts * weight[:, :, None], axis=1)
            total = total * before + tl.sum(part_total * weight, axis=1)
            top = higher
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        address = ((row * heads + head) * GROUP + pair % GROUP)[:, None] * D + offs_d[None, :]
        tl.store(out_ptr + address, nearest(out, out_ptr.dtype.element_ty), mask=mask[:, None] & mask_d[None, :])


def merge(out: torch.Tensor, parts: AttentionParts, metadata: AttentionMetadata, plan: AttentionPlan) -> None:
    """Merge the parts of every request into its results, [R, A, D]."""
    num_requests = len(parts.spans)
    heads = out.shape[1] // plan.group
    few = plan.pairs < 128
    has_many_parts = plan.units > 8 * num_requests
    block_s = max(1, (2048 if few or has_many_parts else 1024) // plan.block_d)
    block_r = block_of(plan.pairs, 1 if few else 4, block_s * plan.block_d)
    blocks = min(ceil_div(plan.pairs, block_r), ceil_div(MOST_MERGES, heads * num_requests))
    _merge_kernel[heads, num_requests, blocks](
        out_ptr=out,
        parts_ptrs=parts,
        row_starts_ptr=metadata.row_starts,
        pairs=plan.pairs,
        GROUP=plan.group,
        D=out.shape[2],
        BLOCK_R=block_r,
        BLOCK_S=block_s,
        BLOCK_D=plan.block_d,
        num_warps=2 if few else 8 if has_many_parts else 4,
    )
