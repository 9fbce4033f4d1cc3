"""Who attends to what in one forward, as a value, and attention over it."""

from dataclasses import dataclass

import torch

from specsim.core.columns import lane_columns, tail_columns
from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, DraftExtendInput, PrefillInput, VerifyInput
from specsim.core.pool import KVBuffer, KVPool


@dataclass(frozen=True, slots=True)
class Keys:
    """What one request's rows may see. slots, positions: i64 [C]; mask: bool [Q, C]."""

    slots: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One forward over R rows, request after request; built anew for every forward (vllm#41162).

    positions: i64 [R]; slots: i64 [R], where a row writes its KV, -1 for a dropped row, which writes nothing and sees
    nothing. keys: one a request, in order, whose masks have as many rows as the request has.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    keys: tuple[Keys, ...]


def _metadata(positions: torch.Tensor, slots: torch.Tensor, keys: list[Keys]) -> AttentionMetadata:
    return AttentionMetadata(torch.where(slots < 0, 0, positions), slots, tuple(keys))


def causal_metadata(
    req_pool_indices: torch.Tensor,
    start_lens: torch.Tensor,
    row_starts: torch.Tensor,
    slots: torch.Tensor,
    pools: KVPool,
) -> AttentionMetadata:
    """Row j of request b stands at column start_lens[b] + j, writes to its slot and sees every column up to its own."""
    keys, positions = [], []
    for row, start, low, high in zip(
        req_pool_indices.tolist(), start_lens.tolist(), row_starts[:-1].tolist(), row_starts[1:].tolist(), strict=True
    ):
        columns = torch.arange(start + high - low)
        own = columns[start:]
        key_slots = torch.cat([pools.slots(row, columns[:start]), slots[low:high]])
        mask = (columns <= own[:, None]) & (key_slots >= 0) & (slots[low:high, None] >= 0)
        keys.append(Keys(key_slots, columns, mask))
        positions.append(own)
    return _metadata(torch.cat([slots[:0], *positions]), slots, keys)


def prefill_metadata(batch: Batch, prefill: PrefillInput, pools: KVPool) -> AttentionMetadata:
    """Prefill, of the target and of the drafter: every column of the chunk has to be owned."""
    slots = pools.slots(batch.req_pool_indices[prefill.requests], prefill.columns)
    return causal_metadata(batch.req_pool_indices, prefill.start_lens, prefill.row_starts, slots, pools)


def extend_metadata(batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> AttentionMetadata:
    """Draft-extend: row j of a request stands at column L + j and sees every column up to its own."""
    extend = draft_extend_input
    return causal_metadata(batch.req_pool_indices, extend.seq_lens, extend.row_starts, extend.cache_locations, pools)


def tree_metadata(batch: Batch, verify_input: VerifyInput, pools: KVPool) -> AttentionMetadata:
    """Verify: a node sees the prefix, and of the tree what its mask row says."""
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
    return _metadata(verify_input.positions, verify_input.cache_locations, keys)


def lane_metadata(batch: Batch, path_BKI: torch.Tensor, config: SpecConfig, pools: KVPool) -> AttentionMetadata:
    """Draft step I-1: lane k of request b stands at position L + I-1.

    path_BKI: the lane that holds lane k's token of every step so far, k itself last. A lane sees the prefix, its tail
    in the lane's own copy, and those tokens.
    """
    num_lanes, num_steps = path_BKI.shape[1:]
    keys, positions, slots = [], [], []
    for request, (row, length) in enumerate(batch.rows_and_lens):
        tail, lanes = tail_columns(length, config), lane_columns(length, config)[:, :num_steps]
        base, position = length - tail.shape[1], length + num_steps - 1
        sees_tail = torch.eye(num_lanes, dtype=torch.bool).repeat_interleave(tail.shape[1], dim=1)
        sees_step = path_BKI[request][:, None, :] == torch.arange(num_lanes)[None, :, None]
        mask = torch.cat([torch.ones(num_lanes, base, dtype=torch.bool), sees_tail, sees_step.flatten(1)], dim=1)
        columns = torch.cat([torch.arange(base), tail.flatten(), lanes.flatten()])
        tail_positions, step_positions = torch.arange(base, length), length + torch.arange(num_steps)
        own_positions = [tail_positions.repeat(num_lanes), step_positions.repeat(num_lanes)]
        key_positions = torch.cat([torch.arange(base), *own_positions])
        kept = position < config.max_len
        keys.append(Keys(pools.slots(row, columns), key_positions, mask & kept))
        positions.append(torch.full((num_lanes,), position))
        slots.append(pools.slots(row, lanes[:, -1]) if kept else torch.full((num_lanes,), -1))
    none = torch.empty(0, dtype=torch.int64)
    return _metadata(torch.cat([none, *positions]), torch.cat([none, *slots]), keys)


def attention(
    query_RAD: torch.Tensor, layer: int, kv: KVBuffer, metadata: AttentionMetadata, window: int | None
) -> torch.Tensor:
    """softmax(q·k / √D) v over the visible keys, [R, A, D].

    window: a row sees that many last positions, its own included. Grouped queries share a key head. A row that sees
    nothing yields zeros. Slots that no row sees are not read.
    """
    out_RAD, start = torch.zeros_like(query_RAD), 0
    group = query_RAD.shape[1] // kv.keys.shape[2]
    for keys in metadata.keys:
        rows = slice(start, start := start + len(keys.mask))
        mask = keys.mask if window is None else keys.mask & (metadata.positions[rows, None] - keys.positions < window)
        seen = mask.any(0)
        key = kv.keys[layer, keys.slots[seen]].repeat_interleave(group, dim=1)
        value = kv.values[layer, keys.slots[seen]].repeat_interleave(group, dim=1)
        logits = torch.einsum("qad,cad->aqc", query_RAD[rows], key) / query_RAD.shape[-1] ** 0.5
        weights = torch.softmax(logits.masked_fill(~mask[:, seen], -torch.inf), dim=-1)
        # Some bfloat16 matrix products carry a row's NaN into other rows.
        weights = torch.where(mask.any(1)[:, None], weights, 0.0)
        out_RAD[rows] = torch.einsum("aqc,cad->qad", weights, value)
    return out_RAD
