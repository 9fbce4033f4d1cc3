"""Who attends to what in one forward, as tensors that kernels build, and attention over them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specsim.config import SpecConfig
from specsim.fast.drafting import Lanes
from specsim.fast.launch import INTERPRETED, block_of, kernel, nearest, require_contiguous
from specsim.phases import Batch, DraftExtendInput, PrefillInput, VerifyInput
from specsim.pool import KVBuffer, KVPool

WORD = tl.constexpr(32)  # visibility bits of one i32, and extra keys of one tile
MOST_SPLITS = 64  # parts that a row's keys are read in


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One forward over R rows, request after request; built anew for every forward (vllm#41162).

    A request's keys are its prefix, of which a row sees the first so many, and its extra keys, of which a row sees
    those whose bit is set. Prefix key c stands at position c. A key without a slot is seen by nobody.

    positions: i64 [R], 0 for a dropped row. slots: i64 [R], where a row writes its KV, -1 for a dropped row, which sees
    nothing. row_starts: i64 [B+1]; max_rows: most rows of a request. prefix_lens: i32 [R], prefix keys that a row
    sees. kv_indices: i32 [B, columns of the pool's table + E], slots, -1 for none: the prefix keys' by column, then the
    extra keys'. num_extras: i32 [B], how many of these there are. extra_positions: i32 [B, E]. visible: i32 [R, E/32
    rounded up], bit e % 32 of word e / 32 says whether extra key e is seen.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    row_starts: torch.Tensor
    max_rows: int
    prefix_lens: torch.Tensor
    kv_indices: torch.Tensor
    num_extras: torch.Tensor
    extra_positions: torch.Tensor
    visible: torch.Tensor


@triton.jit
def lane_column(seq_len, lane, step, num_steps, page_size):
    """Column in which a lane writes its KV of a step; steps -tail..-1 are its copy of the prefix's unfinished page.

    page_size: 1 where lanes share the prefix.
    """
    pages = (seq_len % page_size + num_steps + page_size - 1) // page_size
    return seq_len + lane * pages * page_size + step


@kernel
def _prefix_kernel(
    kv_indices_ptr, table_ptr, rows_ptr, lens_ptr, num_requests, columns, width, page_size,
    BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)[:, None]
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    mask = request < num_requests
    row = tl.load(rows_ptr + request, mask=mask, other=-1)
    length = tl.load(lens_ptr + request, mask=mask, other=0)
    mask &= column < columns
    kept = mask & (row >= 0) & (column < length - length % page_size)
    slot = tl.load(table_ptr + row * columns + column, mask=kept, other=-1)
    tl.store(kv_indices_ptr + request * width + column, slot.to(tl.int32), mask=mask)


def _kv_indices(rows_B, lens_B, page_size: int, num_extras: int, pools: KVPool) -> torch.Tensor:
    """The slots of every prefix without its unfinished page, -1 after it; extra keys are for others to write."""
    num_requests, columns = len(rows_B), pools.req_to_token.shape[1]
    out = torch.empty(num_requests, columns + num_extras, dtype=torch.int32, device=rows_B.device)
    block_c = block_of(columns, 1024)
    block_b = block_of(num_requests, 1, block_c)
    _prefix_kernel[triton.cdiv(num_requests, block_b), triton.cdiv(columns, block_c)](
        out, pools.req_to_token, rows_B, lens_B, num_requests, columns, out.shape[1], page_size,
        BLOCK_B=block_b, BLOCK_C=block_c,
    )  # fmt: skip
    return out


@kernel
def _causal_kernel(
    positions_ptr, prefix_lens_ptr, kv_indices_ptr, num_extras_ptr, slots_ptr, row_starts_ptr, start_lens_ptr,
    rows_ptr, num_requests, columns, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)[:, None]
    mask = request < num_requests
    start = tl.load(start_lens_ptr + request, mask=mask, other=0)
    low = tl.load(row_starts_ptr + request, mask=mask, other=0)
    high = tl.load(row_starts_ptr + request + 1, mask=mask, other=0)
    real = tl.load(rows_ptr + request, mask=mask, other=-1) >= 0
    if tl.program_id(1) == 0:
        tl.store(num_extras_ptr + request, tl.zeros([BLOCK_B, 1], tl.int32), mask=mask)
    step = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[None, :]
    offs, column = low + step, start + step
    mask &= offs < high
    slot = tl.load(slots_ptr + offs, mask=mask, other=-1)
    live = real & (slot >= 0)
    tl.store(positions_ptr + offs, tl.where(live, column, 0), mask=mask)
    tl.store(prefix_lens_ptr + offs, tl.where(live, column + 1, 0).to(tl.int32), mask=mask)
    tl.store(kv_indices_ptr + request * columns + column, slot.to(tl.int32), mask=mask & real & (column < columns))


def _causal_metadata(rows_B, start_lens_B, row_starts, max_rows: int, slots_R, pools: KVPool) -> AttentionMetadata:
    """Row j of request b stands at column start_lens[b] + j, writes to its slot and sees every column up to its own."""
    num_requests, device = len(rows_B), slots_R.device
    metadata = AttentionMetadata(
        positions=torch.empty_like(slots_R),
        slots=slots_R,
        row_starts=row_starts,
        max_rows=max_rows,
        prefix_lens=torch.empty_like(slots_R, dtype=torch.int32),
        kv_indices=_kv_indices(rows_B, start_lens_B, 1, 0, pools),
        num_extras=torch.empty(num_requests, dtype=torch.int32, device=device),
        extra_positions=torch.empty(num_requests, 0, dtype=torch.int32, device=device),
        visible=torch.empty(len(slots_R), 0, dtype=torch.int32, device=device),
    )
    block_r = block_of(max_rows, 256)
    block_b = block_of(num_requests, 1, block_r)
    _causal_kernel[triton.cdiv(num_requests, block_b), triton.cdiv(max_rows, block_r)](
        metadata.positions, metadata.prefix_lens, metadata.kv_indices, metadata.num_extras, slots_R, row_starts,
        start_lens_B, rows_B, num_requests, metadata.kv_indices.shape[1], BLOCK_B=block_b, BLOCK_R=block_r,
    )  # fmt: skip
    return metadata


def prefill_metadata(batch: Batch, prefill: PrefillInput, pools: KVPool) -> AttentionMetadata:
    """Prefill, of the target and of the drafter: every column of the chunk has to be owned. Outside graphs."""
    slots = pools.slots(batch.req_pool_indices[prefill.requests], prefill.columns)
    max_rows = max(prefill.row_starts.diff().tolist(), default=0)
    return _causal_metadata(batch.req_pool_indices, prefill.start_lens, prefill.row_starts, max_rows, slots, pools)


def extend_metadata(batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> AttentionMetadata:
    """Draft-extend: equally many rows a request; rows without a slot stand at the end of a request's."""
    extend = draft_extend_input
    max_rows = len(extend.input_ids) // max(batch.size, 1)
    return _causal_metadata(
        extend.req_pool_indices, extend.seq_lens, extend.row_starts, max_rows, extend.cache_locations, pools
    )


@triton.jit
def _store_starts(row_starts_ptr, offs, rows_per_request, mask):
    """row_starts of requests that have equally many rows."""
    tl.store(row_starts_ptr + offs // rows_per_request, offs, mask=mask & (offs % rows_per_request == 0))
    end = offs + 1
    tl.store(row_starts_ptr + end // rows_per_request, end, mask=mask & (end % rows_per_request == 0))


@kernel
def _tree_kernel(
    positions_ptr, row_starts_ptr, prefix_lens_ptr, kv_indices_ptr, num_extras_ptr, extra_positions_ptr, visible_ptr,
    slots_ptr, rows_ptr, lens_ptr, node_positions_ptr, mask_ptr, num_requests, num_nodes, columns,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    mask = offs < num_requests * num_nodes
    request, node = offs // num_nodes, offs % num_nodes
    slot = tl.load(slots_ptr + offs, mask=mask, other=-1)
    real = tl.load(rows_ptr + request, mask=mask, other=-1) >= 0
    live = real & (slot >= 0)
    if tl.program_id(1) == 0:
        position = tl.load(node_positions_ptr + offs, mask=live, other=0)
        length = tl.load(lens_ptr + request, mask=live, other=0)
        tl.store(positions_ptr + offs, position, mask=mask)
        tl.store(prefix_lens_ptr + offs, length.to(tl.int32), mask=mask)
        tl.store(kv_indices_ptr + request * (columns + num_nodes) + columns + node, slot.to(tl.int32), mask=mask)
        tl.store(extra_positions_ptr + offs, position.to(tl.int32), mask=mask)
        tl.store(num_extras_ptr + request, tl.where(real, num_nodes, 0), mask=mask & (node == 0))
        _store_starts(row_starts_ptr, offs, num_nodes, mask)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    bit = tl.arange(0, WORD)[None, None, :]
    other = word[None, :, None] * WORD + bit
    seen = tl.load(
        mask_ptr + offs[:, None, None] * num_nodes + other, mask=live[:, None, None] & (other < num_nodes), other=0
    )
    num_words = (num_nodes + WORD - 1) // WORD
    packed = tl.sum((seen != 0).to(tl.int32) << bit, axis=2)
    mask_w = mask[:, None] & (word < num_words)[None, :]
    tl.store(visible_ptr + offs[:, None] * num_words + word[None, :], packed, mask=mask_w)


@kernel
def _lane_kernel(
    positions_ptr, slots_ptr, row_starts_ptr, prefix_lens_ptr, kv_indices_ptr, num_extras_ptr, extra_positions_ptr,
    visible_ptr, step_ptr, path_ptr, table_ptr, rows_ptr, lens_ptr,
    num_requests, num_lanes, num_steps, page_size, max_len, columns, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    mask = offs < num_requests * num_lanes
    request, lane, step = offs // num_lanes, offs % num_lanes, tl.load(step_ptr)
    row = tl.load(rows_ptr + request, mask=mask, other=-1)
    length = tl.load(lens_ptr + request, mask=mask, other=0)
    column = lane_column(length, lane, step, num_steps, page_size)
    kept = (row >= 0) & (length + step < max_len) & (column < columns)
    slot = tl.load(table_ptr + row * columns + column, mask=kept, other=-1)
    live, tail = slot >= 0, length % page_size
    num_extras = num_lanes * (tail + step + 1)
    if tl.program_id(1) == 0:
        tl.store(positions_ptr + offs, tl.where(live, length + step, 0), mask=mask)
        tl.store(slots_ptr + offs, slot, mask=mask)
        tl.store(prefix_lens_ptr + offs, tl.where(live, length - tail, 0).to(tl.int32), mask=mask)
        tl.store(num_extras_ptr + request, tl.where(row >= 0, num_extras, 0).to(tl.int32), mask=mask & (lane == 0))
        _store_starts(row_starts_ptr, offs, num_lanes, mask)
    # Extra keys: every lane's copy of the tail, lane after lane, then every step's tokens, step after step.
    most = num_lanes * (page_size - 1 + num_steps)
    word, bit = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, WORD)[None, None, :]
    extra = word[None, :, None] * WORD + bit
    lane, tail, later = lane[:, None, None], tail[:, None, None], extra - (num_lanes * tail)[:, None, None]
    in_tail = later < 0
    holder = tl.where(in_tail, extra // tl.maximum(tail, 1), later % num_lanes)
    held_step = tl.where(in_tail, extra % tl.maximum(tail, 1) - tail, later // num_lanes)
    present = (row >= 0)[:, None, None] & (extra < num_extras[:, None, None])
    path_address = path_ptr + offs[:, None, None] * num_steps + held_step
    on_path = tl.load(path_address, mask=present & ~in_tail, other=-1) == holder
    seen = live[:, None, None] & present & tl.where(in_tail, holder == lane, on_path)
    num_words = (most + WORD - 1) // WORD
    mask_w = mask[:, None] & (word < num_words)[None, :]
    packed = tl.sum(seen.to(tl.int32) << bit, axis=2)
    tl.store(visible_ptr + offs[:, None] * num_words + word[None, :], packed, mask=mask_w)
    first, request = mask[:, None, None] & (lane == 0) & (extra < most), request[:, None, None]
    column = lane_column(length[:, None, None], holder, held_step, num_steps, page_size)
    slot_address = table_ptr + row[:, None, None] * columns + column
    held_slot = tl.load(slot_address, mask=first & present & (column < columns), other=-1)
    tl.store(kv_indices_ptr + request * (columns + most) + columns + extra, held_slot.to(tl.int32), mask=first)
    position = tl.where(present, length[:, None, None] + held_step, 0)
    tl.store(extra_positions_ptr + request * most + extra, position.to(tl.int32), mask=first)


def _equal_rows(batch: Batch, rows: int, extras: int, page_size: int, pools: KVPool, **given) -> AttentionMetadata:
    """Metadata of requests with equally many rows; its prefixes are filled in, the rest is to be written."""
    total, device = batch.size * rows, batch.seq_lens.device

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return AttentionMetadata(
        positions=new(total, dtype=torch.int64),
        row_starts=new(batch.size + 1, dtype=torch.int64),
        max_rows=rows,
        prefix_lens=new(total),
        kv_indices=_kv_indices(batch.req_pool_indices, batch.seq_lens, page_size, extras, pools),
        num_extras=new(batch.size),
        extra_positions=new(batch.size, extras),
        visible=new(total, triton.cdiv(extras, WORD.value)),
        **given,
    )


def tree_metadata(batch: Batch, verify_input: VerifyInput, pools: KVPool) -> AttentionMetadata:
    """Verify: a node sees the prefix, and of the tree what its mask row says."""
    num_nodes, slots = verify_input.draft_tokens.shape[1], verify_input.cache_locations
    metadata = _equal_rows(batch, num_nodes, num_nodes, 1, pools, slots=slots)
    block_w = block_of(metadata.visible.shape[1], 1, WORD.value)
    block_r = block_of(len(slots), 16, WORD.value * block_w)
    _tree_kernel[triton.cdiv(len(slots), block_r), triton.cdiv(metadata.visible.shape[1], block_w)](
        metadata.positions, metadata.row_starts, metadata.prefix_lens, metadata.kv_indices, metadata.num_extras,
        metadata.extra_positions, metadata.visible, slots, batch.req_pool_indices, batch.seq_lens,
        verify_input.positions, verify_input.mask, batch.size, num_nodes, pools.req_to_token.shape[1],
        BLOCK_R=block_r, BLOCK_W=block_w,
    )  # fmt: skip
    return metadata


def lane_metadata(batch: Batch, lanes: Lanes, config: SpecConfig, pools: KVPool) -> AttentionMetadata:
    """Draft step lanes.step, read on the device: lane k of request b stands at position L + step.

    A lane sees the prefix, its tail in the lane's own copy, and the tokens of its path, lanes.path.
    """
    page_size = 1 if config.lanes_share_prefix else config.page_size
    total, extras = batch.size * config.topk, config.topk * (page_size - 1 + config.num_steps)
    slots = torch.empty(total, dtype=torch.int64, device=batch.seq_lens.device)
    metadata = _equal_rows(batch, config.topk, extras, page_size, pools, slots=slots)
    block_w = block_of(metadata.visible.shape[1], 1, WORD.value)
    block_r = block_of(total, 16, WORD.value * block_w)
    _lane_kernel[triton.cdiv(total, block_r), triton.cdiv(metadata.visible.shape[1], block_w)](
        metadata.positions, slots, metadata.row_starts, metadata.prefix_lens, metadata.kv_indices, metadata.num_extras,
        metadata.extra_positions, metadata.visible, lanes.step, lanes.path, pools.req_to_token,
        batch.req_pool_indices, batch.seq_lens, batch.size, config.topk, config.num_steps, page_size, config.max_len,
        pools.req_to_token.shape[1], BLOCK_R=block_r, BLOCK_W=block_w,
    )  # fmt: skip
    return metadata


@triton.jit
def _fold(query, total, top, acc, keys_ptr, values_ptr, slot, loaded, visible, stride_slot, D: tl.constexpr,
          BLOCK_D: tl.constexpr):  # fmt: skip
    """One tile of keys into the online softmax; a key that is not loaded is visible to no row."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    address, mask = slot.to(tl.int64)[:, None] * stride_slot + offs_d, loaded[:, None] & (offs_d < D)
    key = tl.load(keys_ptr + address, mask=mask, other=0.0).to(query.dtype)
    value = tl.load(values_ptr + address, mask=mask, other=0.0).to(query.dtype)
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * (D**-0.5)
    logits = tl.where(visible, logits, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weight, kept = tl.exp(logits - shift[:, None]), tl.exp(top - shift)
    acc = acc * kept[:, None] + tl.dot(weight.to(query.dtype), value, input_precision="ieee")
    return total * kept + tl.sum(weight, axis=1), higher, acc


@kernel
def _attention_kernel(
    out_ptr, query_ptr, keys_ptr, values_ptr, positions_ptr, row_starts_ptr, prefix_lens_ptr, kv_indices_ptr,
    num_extras_ptr, extra_positions_ptr, visible_ptr, parts_ptr, stats_ptr, window, columns, extras, stride_part,
    GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    head, heads, request = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    low, high = tl.load(row_starts_ptr + request), tl.load(row_starts_ptr + request + 1)
    split = (tl.program_id(0) % SPLITS).to(tl.int64)
    pair = tl.program_id(0) // SPLITS * BLOCK_M + tl.arange(0, BLOCK_M)  # a row and a query head of the group
    row = low + pair // GROUP
    mask = row < high
    offs_d = tl.arange(0, BLOCK_D)
    query_head = (row * heads + head) * GROUP + pair % GROUP
    address = query_head[:, None] * D + offs_d[None, :]
    mask_q = mask[:, None] & (offs_d < D)[None, :]
    query = tl.load(query_ptr + address, mask=mask_q, other=0.0).to(DOT)
    position = tl.load(positions_ptr + row, mask=mask, other=0)
    prefix_len = tl.load(prefix_lens_ptr + row, mask=mask, other=0)
    total, top = tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys_ptr, values_ptr, stride_slot = keys_ptr + head * D, values_ptr + head * D, heads * D
    kv_indices_ptr += request * (columns + extras)

    first = tl.where(prefix_len > 0, tl.maximum(position - window + 1, 0), columns)  # of the window
    start, end = tl.min(first, axis=0), tl.max(prefix_len, axis=0)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), SPLITS), BLOCK_C) * BLOCK_C
    start, end = start + split * share, tl.minimum(end, start + (split + 1) * share)
    for tile in range(start // BLOCK_C * BLOCK_C, end, BLOCK_C):
        column = tile + tl.arange(0, BLOCK_C)
        inside = (column >= start) & (column < end)
        slot = tl.load(kv_indices_ptr + column, mask=inside, other=-1)
        visible = (column[None, :] >= first[:, None]) & (column[None, :] < prefix_len[:, None]) & (slot >= 0)[None, :]
        total, top, acc = _fold(
            query, total, top, acc, keys_ptr, values_ptr, slot, slot >= 0, visible, stride_slot, D, BLOCK_D
        )

    num_words, bit = (extras + WORD - 1) // WORD, tl.arange(0, WORD)
    num_extras = tl.where(split == SPLITS - 1, tl.load(num_extras_ptr + request), 0)
    for tile in range(0, num_extras, WORD):
        bits = tl.load(visible_ptr + row * num_words + tile // WORD, mask=mask, other=0)
        inside = tile + bit < extras
        slot = tl.load(kv_indices_ptr + columns + tile + bit, mask=inside, other=-1)
        place = tl.load(extra_positions_ptr + request * extras + tile + bit, mask=inside, other=0)
        visible = ((bits[:, None] >> bit[None, :]) & 1 != 0) & (slot >= 0)[None, :]
        visible = visible & (position[:, None] - place[None, :] < window)
        loaded = tl.max(visible.to(tl.int32), axis=0) > 0
        total, top, acc = _fold(
            query, total, top, acc, keys_ptr, values_ptr, slot, loaded, visible, stride_slot, D, BLOCK_D
        )
    if SPLITS == 1:
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + address, nearest(out, out_ptr.dtype.element_ty), mask=mask_q)
    else:
        tl.store(parts_ptr + split * stride_part * D + address, acc, mask=mask_q)
        stats_ptr += 2 * (split * stride_part + query_head)
        tl.store(stats_ptr, top, mask=mask)
        tl.store(stats_ptr + 1, total, mask=mask)


@kernel
def _merge_kernel(
    out_ptr, parts_ptr, stats_ptr, count,
    D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The parts of every row and head, always in their order, under the largest of their maxima."""
    row, split = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64), tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (row < count)[:, None] & (split < SPLITS)[None, :]
    stats = 2 * (split[None, :].to(tl.int64) * count + row[:, None])
    top = tl.load(stats_ptr + stats, mask=mask, other=float("-inf"))
    total = tl.load(stats_ptr + stats + 1, mask=mask, other=0.0)
    highest = tl.max(top, axis=1)
    scale = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
    whole = tl.sum(scale * total, axis=1)
    scale /= tl.where(whole > 0, whole, 1.0)[:, None]
    address = (split[None, :, None].to(tl.int64) * count + row[:, None, None]) * D + offs_d[None, None, :]
    parts = tl.load(parts_ptr + address, mask=mask[:, :, None] & (offs_d < D)[None, None, :], other=0.0)
    out = tl.sum(parts * scale[:, :, None], axis=1)
    mask_d = (row < count)[:, None] & (offs_d < D)[None, :]
    tl.store(out_ptr + row[:, None] * D + offs_d[None, :], nearest(out, out_ptr.dtype.element_ty), mask=mask_d)


def _num_splits(programs: int, columns: int, device: torch.device) -> int:
    """In how many parts keys are read so that a GPU has two programs for each of its multiprocessors; one elsewhere."""
    if device.type != "cuda":
        return 1
    wanted = triton.cdiv(2 * torch.cuda.get_device_properties(device).multi_processor_count, programs)
    return max(1, min(wanted, MOST_SPLITS, triton.cdiv(columns, 64)))


def attention(
    query_RAD: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
    window: int | None,
    out: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """softmax(q·k / √D) v over the visible keys, [R, A, D]: online softmax in f32, rows of a request share key loads.

    window: a row sees that many last positions, its own included. Grouped queries share a key head. A row that sees
    nothing yields zeros. Slots that no row sees are not read. splits: in how many parts the keys of a row are read
    side by side (None: as many as keep the device busy), which are merged in their order.
    """
    require_contiguous(query_RAD=query_RAD)
    out = torch.empty_like(query_RAD) if out is None else out
    keys, values, extras = kv.keys[layer], kv.values[layer], metadata.extra_positions.shape[1]
    kv_heads, head_dim = keys.shape[1:]
    group, count = query_RAD.shape[1] // kv_heads, query_RAD.shape[0] * query_RAD.shape[1]
    pairs, columns = metadata.max_rows * group, metadata.kv_indices.shape[1] - extras
    block_m = max(16, min(block_of(pairs, 64, max(128, head_dim)), triton.next_power_of_2(pairs)))
    blocks, requests = triton.cdiv(pairs, block_m), len(metadata.num_extras)
    splits = splits or _num_splits(max(1, blocks * kv_heads * requests), columns, query_RAD.device)
    parts = out if splits == 1 else out.new_empty(splits, count, head_dim, dtype=torch.float32)
    stats = out if splits == 1 else out.new_empty(splits, count, 2, dtype=torch.float32)
    block_d = max(16, triton.next_power_of_2(head_dim))
    _attention_kernel[blocks * splits, kv_heads, requests](
        out, query_RAD, keys, values, metadata.positions, metadata.row_starts, metadata.prefix_lens,
        metadata.kv_indices, metadata.num_extras, metadata.extra_positions, metadata.visible, parts, stats,
        2**30 if window is None else window, columns, extras, count,
        GROUP=group, D=head_dim, SPLITS=splits, BLOCK_M=block_m, BLOCK_D=block_d,
        BLOCK_C=128 if INTERPRETED else 64, DOT=_dot_type(query_RAD.dtype, keys.dtype),
    )  # fmt: skip
    if splits > 1:
        block_s = triton.next_power_of_2(splits)
        block_r = block_of(count, 1, block_s * block_d)
        _merge_kernel[(triton.cdiv(count, block_r),)](
            out, parts, stats, count, D=head_dim, SPLITS=splits, BLOCK_S=block_s, BLOCK_R=block_r, BLOCK_D=block_d
        )
    return out


def _dot_type(query: torch.dtype, keys: torch.dtype) -> tl.dtype:
    """What is multiplied: the common type, f32 for two types and under the interpreter, which cannot multiply bf16."""
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if INTERPRETED or query != keys else types.get(query, tl.float32)
