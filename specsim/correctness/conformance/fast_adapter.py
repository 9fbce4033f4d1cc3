"""Adapter of the fast implementation: specsim conformance --module specsim.correctness.conformance.fast_adapter.

It is also an example for kernels with other states or other forms of results.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import AutoregressiveInput, Batch, Candidates, PrefillInput, Verdict
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.correctness.conformance.fast_verifiers import (
    TreeBatch,
    rejection_sample,
    tree_speculative_sampling_target_only,
    verify_input,
    verify_tree_greedy,
)

_FAR = 2**31 - 1  # no-op length limit

__all__ = ["rejection_sample", "tree_speculative_sampling_target_only", "verify_tree_greedy"]  # re-exported


def fast_topk(values: Tensor, topk: int, dim: int) -> tuple[Tensor, Tensor]:
    """Look up the values at the kernel's indices; its probabilities are not used."""
    from specsim.fast.vocabulary.topk import draft_topk

    _, indices = draft_topk(values.contiguous(), topk, None)
    return values.gather(dim, indices), indices


def select_top_k_tokens(
    i: int, topk_p: Tensor, topk_index: Tensor, hidden_states: Tensor, scores: Tensor | None, topk: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Run one step of a loop of three.

    The lanes before it are its first candidates, the lanes after it the next block.
    """
    from specsim.fast.drafting import expand, start_lanes

    batch = len(topk_p) if scores is None else len(scores)
    config = SpecConfig(topk, 3, 4 if topk == 1 else 2, page_size=1)
    bonus = torch.zeros(batch, dtype=torch.int32, device=topk_p.device)
    if scores is None:
        lanes = start_lanes(AutoregressiveInput(bonus, topk_p, topk_index, hidden_states), config)
        pool = lanes.candidates
        tree = pool.scores[:, None, :topk].clone(), pool.tokens[:, :topk].clone(), pool.parent_list[:, : 1 + topk]
        return lanes.tokens.flatten(), lanes.hidden.flatten(0, 1), pool.scores[:, :topk].clone(), tree
    first_index = torch.zeros_like(scores, dtype=torch.int64)
    lanes = start_lanes(AutoregressiveInput(bonus, scores, first_index, hidden_states[::topk].contiguous()), config)
    pool = lanes.candidates
    shape = batch, topk, topk
    hidden_BKH = hidden_states.view(batch, topk, hidden_states.shape[1])
    expand(lanes, topk_p.view(shape), topk_index.view(shape), hidden_BKH, config)
    children = slice(topk, topk + topk * topk)
    chosen = pool.parent_list[:, 1 + topk : 1 + 2 * topk]
    tree = pool.scores[:, children].reshape(shape), pool.tokens[:, children].clone(), chosen + (i - 1) * topk * topk
    return lanes.tokens.flatten(), lanes.hidden.flatten(0, 1), pool.scores.gather(1, chosen), tree


def organize_draft_results(
    score_list: list[Tensor], token_list: list[Tensor], parents_list: list[Tensor], num_draft_token: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Select from all steps' scores at once."""
    from specsim.fast.tree import select

    chosen = select(torch.cat([scores.flatten(1) for scores in score_list], dim=1), num_draft_token - 1)
    return torch.cat(parents_list[:-1] or parents_list, dim=1), chosen, torch.cat(token_list, dim=1).gather(1, chosen)


def build_tree_kernel_efficient(
    parent_list: Tensor, selected_index: Tensor, verified_seq_len: Tensor, tree_mask: Tensor, positions: Tensor,
    retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor, topk: int, depth: int,
    draft_token_num: int, tree_mask_mode: int,
) -> None:  # fmt: skip
    """Select and build at once, with scores 1 for the selected candidates and 0 for the others."""
    from specsim.fast.tree import bitpacked_mask, build, check, full_mask

    batch = len(selected_index)
    device = selected_index.device
    config = SpecConfig(topk, depth, draft_token_num)
    tokens = torch.zeros(batch, config.num_candidates, dtype=torch.int64, device=device)
    check(Candidates(tokens, tokens.float(), parent_list), selected_index, config)
    scores = tokens.float().scatter_(1, selected_index, 1.0)
    locations = torch.zeros(batch, draft_token_num, dtype=torch.int64, device=device)
    candidates = Candidates(tokens, scores, parent_list)
    tree = build(candidates, torch.zeros(batch, device=device).int(), verified_seq_len, locations, config)
    layouts = (lambda: full_mask(tree.mask, verified_seq_len), lambda: tree.mask, lambda: bitpacked_mask(tree.mask))
    tree_mask.copy_(layouts[tree_mask_mode]().flatten().view(tree_mask.dtype))
    positions.copy_(tree.positions)
    retrive_index.copy_(tree.retrieve_index)
    retrive_next_token.copy_(tree.retrieve_next_token)
    retrive_next_sibling.copy_(tree.retrieve_next_sibling)


def move_kv_cache_native(k_buffer: list[Tensor], v_buffer: list[Tensor], tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Commit one request that owns the target slots from its first column on."""
    from specsim.fast.kv import commit

    count = len(src_loc)
    device = src_loc.device
    if count == 0:
        return
    pools = _pool(torch.stack(list(k_buffer)), torch.stack(list(v_buffer)), tgt_loc.long()[None])
    path = torch.arange(count, dtype=torch.int32, device=device)
    number = torch.tensor([count], dtype=torch.int32, device=device)
    verdict = Verdict(path, path[None], number - 1, number, torch.zeros(1, count, device=device))
    commit(_batch([0], device), src_loc.long(), verdict, pools)
    for layer, (keys, values) in enumerate(zip(k_buffer, v_buffer, strict=True)):
        keys.copy_(pools.target.keys[layer])
        values.copy_(pools.target.values[layer])


def _batch(seq_lens: list[int], device: torch.device, rows: list[int] | None = None) -> Batch:
    """Make requests of these lengths, in the first rows of the table unless others are named."""
    requests = range(len(seq_lens))
    params = [SamplingParams()] * len(seq_lens)
    return Batch.of(requests, requests if rows is None else rows, seq_lens, params, vocab_size=1).to(device)


def _pool(keys: Tensor, values: Tensor, table: Tensor) -> KVPool:
    """Make a pool with this KV [layers, slots, heads, D] and this table of slots."""
    layers, slots, heads, dim = keys.shape
    buffer = KVBuffer(KVLayout(layers, heads, dim), slots, keys.dtype, keys.device)
    buffer.keys.copy_(keys)
    buffer.values.copy_(values)
    pools = KVPool(buffer, None, 1, len(table), table.shape[1] + 2)
    pools.req_to_token[:, : table.shape[1]] = table
    return pools


def assign_extend_cache_locs_func(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, _end_offset: Tensor, _batch_size: int,
    draft_token_num: int, device: torch.device,
) -> Tensor:  # fmt: skip
    """Compute the locations of a tree's columns from a table in the pools' dtype."""
    from specsim.fast.kv import tree_locations

    config = SpecConfig(1, draft_token_num - 1, draft_token_num)
    batch = _batch(start_offset.tolist(), device, req_pool_indices.tolist())
    kv = torch.zeros(1, 1, 1, 1, device=device)
    return tree_locations(batch, config, _pool(kv, kv, req_to_token)).flatten()


def draft_lane_locations(
    req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor, topk: int, num_steps: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """List the slots that draft steps write, and those that copies of tails move."""
    from specsim.fast.drafting.lanes import Lanes, lane_metadata
    from specsim.fast.kv import duplicate_tails

    batch_size = len(seq_lens)
    device = seq_lens.device
    config = SpecConfig(topk, num_steps, num_steps + 1 if topk == 1 else 2, page_size, max_len=_FAR)
    batch = _batch(seq_lens.tolist(), device, req_pool_indices.tolist())
    numbers = torch.arange(int(req_to_token.max()) + 2, device=device)
    kv = numbers.float().view(1, -1, 1, 1)
    pools = _pool(kv, kv, req_to_token)
    pools.draft = pools.target
    duplicate_tails(batch, config, pools)
    moved_to = pools.target.keys[0, :, 0, 0].long()
    row_slots = req_to_token[req_pool_indices]
    target = row_slots[(row_slots >= 0) & (moved_to != numbers)[row_slots.clamp(min=0)]]
    lanes = Lanes.empty(batch_size, 1, config, torch.float32, device)
    lanes.path.zero_()
    lanes.step.zero_()
    slots = [torch.zeros(0, batch_size, topk, dtype=torch.int64, device=device)]
    for step in range(num_steps):
        lanes.step[0] = step
        slots.append(lane_metadata(batch, lanes, config, pools).slots.view(1, batch_size, topk))
    return torch.cat(slots).permute(1, 2, 0).flatten(), moved_to[target], target


def rotate_input_ids_triton(
    input_ids: Tensor, extend_start_loc: Tensor, extend_seq_lens: Tensor, topk_index: Tensor
) -> None:
    """Shift adjacent chunks; their starts and the last end give their places."""
    from specsim.fast.kv import shift_left

    ends = torch.cat([extend_start_loc, (extend_start_loc + extend_seq_lens)[-1:]])
    starts = ends if len(extend_start_loc) else torch.zeros(1, dtype=torch.int64, device=input_ids.device)
    input_ids.copy_(shift_left(PrefillInput(input_ids, starts, extend_start_loc, topk_index), topk_index))


def fill_bonus_tokens(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Fill the bonus tokens of a chain whose predictions and path are the tokens of a row."""
    from specsim.fast.kv import draft_extend_input

    batch_size = len(accept_lens)
    device = accept_lens.device
    path = torch.arange(batch_size * accept_stride, dtype=torch.int32, device=device).view(batch_size, accept_stride)
    logprobs = torch.zeros(batch_size, accept_stride, device=device)
    verdict = Verdict(accept_tokens, path, accept_lens - 1, accept_lens, logprobs)
    features = torch.zeros(len(accept_tokens), 1, device=device)
    extend_input = draft_extend_input(_batch([0] * batch_size, device), verdict, features, path.long(), _FAR, "fixed")
    bonus_tokens.copy_(extend_input.bonus_tokens)


def tree_attention(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, o: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    tree_mask: Tensor, tree_mask_mode: int, draft_token_num: int,
) -> None:  # fmt: skip
    """Attend with every request's slots as a row of the table, the prefix's before the tree's."""
    from specsim.fast.attention import attention
    from specsim.fast.model.metadata import tree_metadata

    device = q.device
    lens = kv_indptr.long().diff() - draft_token_num
    batch_size = len(lens)
    num_nodes = draft_token_num
    table = torch.full((max(1, batch_size), int(lens.max()) + num_nodes if batch_size else 1), -1, device=device)
    for request, (low, high) in enumerate(zip(kv_indptr[:-1].tolist(), kv_indptr[1:].tolist(), strict=True)):
        table[request, : high - low] = kv_indices[low:high]
    columns = lens[:, None] + torch.arange(num_nodes, device=device)
    mask_BNN = _square(tree_mask, tree_mask_mode, lens.tolist(), num_nodes)
    tree = replace(
        verify_input(TreeBatch(columns, columns, columns)),
        positions=columns.flatten(),
        mask=mask_BNN.contiguous(),
        cache_locations=table[:batch_size].gather(1, columns).flatten(),
    )
    pools = _pool(k_buffer[None], v_buffer[None], table)
    attention(q, 0, pools.target, tree_metadata(_batch(lens.tolist(), device), tree, pools), None, out=o)


def _square(tree_mask: Tensor, mode: int, lens: list[int], num_nodes: int) -> Tensor:
    """Unpack any layout to bool [B, N, N]."""
    if mode == 0:
        sizes = [num_nodes * (length + num_nodes) for length in lens]
        parts = [part.view(num_nodes, -1)[:, -num_nodes:] for part in tree_mask.split(sizes)]
        return torch.stack(parts) if parts else tree_mask.view(0, num_nodes, num_nodes)
    if mode == 1:
        return tree_mask.view(-1, num_nodes, num_nodes)
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tree_mask.element_size()]
    words = tree_mask.view(signed).long().view(-1, num_nodes, 1)
    return (words >> torch.arange(num_nodes, device=tree_mask.device)) & 1 == 1
