"""Attention, and its metadata in one forward: the keys that each row sees."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, DraftExtendInput, PrefillInput, VerifyInput
from specsim.core.pool import KVBuffer, KVPool, lane_columns, tail_columns


class Scores(NamedTuple):
    """Scores of a layer's keys, beyond q·k / √D over all visible keys."""

    window: int | None = None  # number of positions that a row sees, its own last; None: all
    sinks: torch.Tensor | None = None  # [A], one more score of each query head, whose weight is dropped
    scale: float | None = None  # factor of q·k; None: 1 / √D
    first_columns: int = 0  # positions from 0 on that a row sees besides its window


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one request, C of them for its Q rows."""

    slots: torch.Tensor  # i64 [C]
    positions: torch.Tensor  # i64 [C]
    mask: torch.Tensor  # bool [Q, C], whether row sees key


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Attention metadata of one forward over R rows, request after request, rebuilt for every forward (vllm#41162)."""

    positions: torch.Tensor  # i64 [R], 0 for a dropped row
    slots: torch.Tensor  # i64 [R], destination of a row's KV; -1 for a dropped row, which writes and sees nothing
    keys: tuple[Keys, ...]  # of each request, in order; masks have as many rows as the request


def _metadata(positions: list[torch.Tensor], slots: list[torch.Tensor], keys: list[Keys]) -> AttentionMetadata:
    none = torch.empty(0, dtype=torch.int64)
    slots_R = torch.cat([none, *slots])
    return AttentionMetadata(torch.where(slots_R < 0, 0, torch.cat([none, *positions])), slots_R, tuple(keys))


def causal_metadata(
    req_pool_indices: torch.Tensor,
    start_lens: torch.Tensor,
    row_starts: torch.Tensor,
    slots: torch.Tensor,
    pools: KVPool,
) -> AttentionMetadata:
    """Make causal metadata, in which a row sees every column up to its own.

    Row j of request b is column start_lens[b] + j.

    slots: i64 [R], -1 for a row that is dropped. start_lens: i64 [B]. row_starts: i64 [B+1].
    """
    keys = []
    positions = []
    for row, start, (low, high) in zip(
        req_pool_indices.tolist(), start_lens.tolist(), pairwise(row_starts.tolist()), strict=True
    ):
        columns = torch.arange(start + high - low)
        row_columns = columns[start:]
        key_slots = torch.cat([pools.slots(row, columns[:start]), slots[low:high]])
        mask = (columns <= row_columns[:, None]) & (key_slots >= 0) & (slots[low:high, None] >= 0)
        keys.append(Keys(key_slots, columns, mask))
        positions.append(row_columns)
    return _metadata(positions, [slots], keys)


def prefill_metadata(batch: Batch, prefill: PrefillInput, pools: KVPool) -> AttentionMetadata:
    """Make the causal metadata of a prefill, for target and drafter.

    Every column of the chunk must be owned.
    """
    slots = pools.slots(batch.req_pool_indices[prefill.requests], prefill.columns)
    return causal_metadata(batch.req_pool_indices, prefill.start_lens, prefill.row_starts, slots, pools)


def extend_metadata(
    batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, bonus_columns: int = 0
) -> AttentionMetadata:
    """Make the causal metadata of draft-extend: row j of a request is column L + bonus_columns + j."""
    extend = draft_extend_input
    start_lens = extend.seq_lens + bonus_columns
    return causal_metadata(batch.req_pool_indices, start_lens, extend.row_starts, extend.cache_locations, pools)


def tree_metadata(batch: Batch, verify_input: VerifyInput, pools: KVPool) -> AttentionMetadata:
    """Make the metadata of verify: node n sees columns 0..L-1, and node m where mask[n, m] (arXiv 2305.09781)."""
    locations_BN = verify_input.cache_locations.view_as(verify_input.draft_tokens)
    positions_BN = verify_input.positions.view_as(verify_input.draft_tokens)
    keys = []
    for request, (row, length) in enumerate(batch.rows_and_lens):
        prefix = torch.arange(length)
        live = locations_BN[request] >= 0
        keys.append(
            Keys(
                torch.cat([pools.slots(row, prefix), locations_BN[request]]),
                torch.cat([prefix, positions_BN[request]]),
                torch.nn.functional.pad(verify_input.mask[request] & live, (length, 0), value=True) & live[:, None],
            )
        )
    return _metadata([verify_input.positions], [verify_input.cache_locations], keys)


def lane_metadata(
    batch: Batch, path_BKI: torch.Tensor, config: SpecConfig, pools: KVPool, bonus_columns: int = 0
) -> AttentionMetadata:
    """Make the metadata of draft step I-1, in which each lane sees the prefix and its own path.

    All lanes are at position L + bonus_columns + I-1, after a prefix of L + bonus_columns columns.

    path_BKI: for each step i < I the lane that holds the token of lane k's path, k itself last. The prefix's tail is
    read from the lane's own copy.
    """
    num_lanes, num_steps = path_BKI.shape[1:]
    keys = []
    positions = []
    slots = []
    for request, (row, seq_len) in enumerate(batch.rows_and_lens):
        length = seq_len + bonus_columns
        tail = tail_columns(length, config)
        lanes = lane_columns(length, config)[:, :num_steps]
        base = length - tail.shape[1]
        position = length + num_steps - 1
        sees_tail = torch.eye(num_lanes, dtype=torch.bool).repeat_interleave(tail.shape[1], dim=1)
        sees_step = path_BKI[request][:, None, :] == torch.arange(num_lanes)[None, :, None]
        mask = torch.cat([torch.ones(num_lanes, base, dtype=torch.bool), sees_tail, sees_step.flatten(1)], dim=1)
        columns = torch.cat([torch.arange(base), tail.flatten(), lanes.flatten()])
        tail_positions = torch.arange(base, length).repeat(num_lanes)
        step_positions = (length + torch.arange(num_steps)).repeat(num_lanes)
        key_positions = torch.cat([torch.arange(base), tail_positions, step_positions])
        is_within_limit = position < config.length_limit
        keys.append(Keys(pools.slots(row, columns), key_positions, mask & is_within_limit))
        positions.append(torch.full((num_lanes,), position))
        slots.append(pools.slots(row, lanes[:, -1]) if is_within_limit else torch.full((num_lanes,), -1))
    return _metadata(positions, slots, keys)


def attention(
    query_RAD: torch.Tensor, layer: int, kv: KVBuffer, metadata: AttentionMetadata, scores: Scores | None
) -> torch.Tensor:
    """Compute softmax(q·k / √D) v over the visible keys, [R, A, value D] (arXiv 1706.03762).

    scores: None for plain ones. A / (KV heads) query heads share a KV head (arXiv 2305.13245). A row that sees nothing
    gives zeros. Slots that no row sees are not read.
    """
    window, sinks_A, scale, first_columns = scores or Scores()
    num_heads = query_RAD.shape[1]
    out_RAD = query_RAD.new_zeros(*query_RAD.shape[:2], kv.values.shape[-1])
    start = 0
    group = num_heads // kv.keys.shape[2]
    for keys in metadata.keys:
        rows = slice(start, start := start + len(keys.mask))
        mask = keys.mask
        if window is not None:
            age_QC = metadata.positions[rows, None] - keys.positions
            mask = mask & ((age_QC < window) | (keys.positions < first_columns))
        seen = mask.any(0)
        key, value = (x.repeat_interleave(group, dim=1) for x in kv.read(layer, keys.slots[seen], query_RAD.dtype))
        logits = torch.einsum("qad,cad->aqc", query_RAD[rows], key)
        logits = logits / query_RAD.shape[-1] ** 0.5 if scale is None else logits * scale
        logits = logits.masked_fill(~mask[:, seen], -torch.inf)
        if sinks_A is not None:
            logits = torch.cat([logits, sinks_A[:, None, None].expand(-1, len(mask), 1)], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : key.shape[0]]
        # Some bfloat16 matrix products spread a row's NaN to other rows.
        weights = torch.where(mask.any(1)[:, None], weights, 0.0)
        out_RAD[rows] = torch.einsum("aqc,cad->qad", weights, value)
    return out_RAD
