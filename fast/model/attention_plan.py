"""Plan of an attention launch: tile sizes, and the parallel parts in which a request's keys are read."""

import functools
from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.runtime.launch import (
    INTERPRETED,
    block_of,
    ceil_div,
    dot_type,
    has_warp_roles,
    next_power_of_2,
    next_power_of_16,
    stages_within,
)

MANY = 2**30  # more than any count here


class Tiling(NamedTuple):
    """Size and resources of a program."""

    block_m: int  # pairs of a row and a query head
    block_c: int  # keys of a tile
    stages: int  # tiles that are loaded at a time
    warps: int
    resident: int  # programs of a multiprocessor


def _tiling(pairs: int, block_d: int, dot: tl.dtype) -> Tiling:
    """Choose the tiling measured fastest on an H200 for heads of 128 in two bytes.

    Wider heads get smaller tiles.
    """
    least = max(16, next_power_of_2(pairs))
    if INTERPRETED:
        return Tiling(min(block_of(pairs, 64, max(128, block_d)), least), 128, 1, 4, 1)
    if dot.primitive_bitwidth > 16:
        return Tiling(min(least, max(16, 4096 // max(block_d, 128))), 32, 2, 8, 1)
    if block_d > 128:
        return Tiling(min(least, 64), 32, 2, 8, 1)
    if least >= 128:
        return Tiling(128, 64, 3, 8, 1)
    return Tiling(least, 64, 4 if least == 16 else 3, 4, 2)


class Partition(NamedTuple):
    """Numbers of parts into which requests' keys are cut: at most one for every `share` keys."""

    share: int
    units: int  # bound on the parts of all requests, but for one of each request
    least: int  # parts of one request
    most: int  # parts of one request

    def most_units(self, num_requests: int) -> int:
        """Bound the number of parts of all requests, whatever their lengths."""
        return min(self.units + num_requests - 1, self.most * num_requests)


def _partition(programs: int, pairs: int, splits: int | None, invariant: bool) -> Partition:
    """Choose a partition for `programs` units on the device, each with `pairs` pairs of a row and a query head."""
    if splits:
        return Partition(1, MANY, splits, splits)
    if invariant:  # by a request's own keys alone; parts of many rows would fill the memory
        return Partition(256, MANY, 1, max(1, min(16, 2048 // max(1, pairs))))
    return Partition(128, max(1, programs), 1, MANY)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Programs of one launch, and the work of each."""

    group: int  # query heads of a key head
    pairs: int  # most pairs of a row and a query head of a group, of a request
    blocks: int  # programs that share these pairs
    units: int  # bound on the parts of all requests
    partition: Partition | None  # None: the keys of every request are one part
    tiling: Tiling
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
) -> Plan:
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
        tiling = Tiling(128, 128, 768 // head_dim, 4, 1)
    else:
        tiling = _tiling(64 if invariant and not metadata.has_equal_rows else pairs, block_d, dot)
        tile_bytes = tiling.block_c * block_d * dot.primitive_bitwidth // 8
        stages = stages_within(tiling.stages, 2 * tile_bytes, spare=tiling.block_m * block_d * 2)
        tiling = tiling._replace(stages=stages)
    blocks = ceil_div(pairs, tiling.block_m)
    programs = _multiprocessors(query_RAD.device) * tiling.resident // max(1, heads * blocks)
    partition = _partition(programs, pairs if metadata.has_equal_rows else MANY, splits, invariant)
    units = partition.most_units(num_requests)
    return Plan(
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
    kept: tl.tensor  # the request's first part among those that are kept
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
    kept = tl.sum(tl.where((offs < request) & (splits > 1), splits, 0), axis=0)
    own = offs == request
    num_splits = tl.sum(tl.where(own, splits, 0), axis=0)
    split = unit - tl.sum(tl.where(own, ends - splits, 0), axis=0)
    return Assignment(request, split, num_splits, kept, tl.sum(tl.where(own, length, 0), axis=0))


@triton.jit
@no_type_check
def tiles_of(split, num_splits, first_tile, num_tiles):
    """Compute the tiles of one of num_splits parts, (first, end), whose counts differ by at most one."""
    each = num_tiles // num_splits
    more = num_tiles - each * num_splits
    low_tile = first_tile + split * each + tl.minimum(split, more)
    return low_tile, low_tile + each + (split < more).to(tl.int32)
