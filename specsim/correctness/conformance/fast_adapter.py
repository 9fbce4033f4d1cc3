"""The fast column under the public names: specsim conformance --module specsim.correctness.conformance.fast_adapter.

It is also an example of an adapter: kernels that take other states, or give what they return in another form.
"""

from types import SimpleNamespace

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch, Candidates, DraftInput, PrefillInput, Verdict
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.correctness.conformance.fast_verifiers import (
    rejection_sample,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)

_FAR = 2**31 - 1  # a length limit that nothing reaches

__all__ = [
    "assign_extend_cache_locs_func",
    "build_tree_kernel_efficient",
    "draft_lane_locations",
    "fast_topk",
    "fill_bonus_tokens",
    "move_kv_cache_native",
    "organize_draft_results",
    "rejection_sample",
    "rotate_input_ids_triton",
    "select_top_k_tokens",
    "tree_attention",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
]


def fast_topk(values, topk, dim):
    """Probabilities are not asked for: what the kernel finds is looked up."""
    from specsim.fast.vocabulary.topk import draft_topk

    _, indices = draft_topk(values.contiguous(), topk, None)
    return values.gather(dim, indices), indices


def select_top_k_tokens(i, topk_p, topk_index, hidden_states, scores, topk):
    """One step of a loop of three: the lanes before it are its first candidates, those after it the next block."""
    from specsim.fast.drafting import Lanes, expand, start_lanes

    batch, device = topk_p.numel() // (topk * topk if i else topk), topk_p.device
    config = SpecConfig(topk, 3, 4 if topk == 1 else 2, page_size=1)
    lanes = Lanes.empty(batch, hidden_states.shape[1], config, hidden_states.dtype, device)
    first_p, first_index = (topk_p, topk_index) if i == 0 else (scores, torch.zeros(batch, topk).long().to(device))
    hidden = hidden_states if i == 0 else hidden_states[::topk].contiguous()
    start_lanes(DraftInput(first_p, first_index, hidden, torch.zeros(batch).int().to(device)), lanes, config)
    made, own = lanes.candidates, slice(0, topk)
    if i == 0:
        parents = torch.cat([made.parent_list[:, :1], made.parent_list[:, 1 : 1 + topk]], dim=1)
        scores, tree_scores = made.scores[:, own].clone(), made.scores[:, None, own].clone()
        tree = tree_scores, made.tokens[:, own].clone(), parents
        return lanes.tokens.flatten(), lanes.hidden.flatten(0, 1), scores, tree
    shape = batch, topk, topk
    expand(
        lanes,
        topk_p.view(shape),
        topk_index.view(shape),
        hidden_states.view(batch, topk, hidden_states.shape[1]),
        config,
    )
    own, chosen = slice(topk, topk + topk * topk), made.parent_list[:, 1 + topk : 1 + 2 * topk]
    parents = chosen + (i - 1) * topk * topk
    tree = made.scores[:, own].reshape(shape), made.tokens[:, own].clone(), parents
    return lanes.tokens.flatten(), lanes.hidden.flatten(0, 1), made.scores.gather(1, chosen), tree


def organize_draft_results(score_list, token_list, parents_list, num_draft_token):
    """The column selects of all steps' scores at once."""
    from specsim.fast.drafting import select

    scores, tokens = torch.cat([each.flatten(1) for each in score_list], dim=1), torch.cat(token_list, dim=1)
    chosen = select(scores, num_draft_token - 1)
    return torch.cat(parents_list[:-1] or parents_list, dim=1), chosen, tokens.gather(1, chosen)


def build_tree_kernel_efficient(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index, retrive_next_token,
    retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    """The column selects and builds at once: of scores 1 for the selected and 0 for the others it selects these."""
    from specsim.fast.tree import bitpacked_mask, build, check, full_mask

    (batch, device), config = (len(selected_index), selected_index.device), SpecConfig(topk, depth, draft_token_num)
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


def move_kv_cache_native(k_buffer, v_buffer, tgt_loc, src_loc):
    """The commit of one request that owns the target slots from its first column on."""
    from specsim.fast.kv import commit

    count, device = len(src_loc), src_loc.device
    if count == 0:
        return
    pools = _pool(torch.stack(list(k_buffer)), torch.stack(list(v_buffer)), tgt_loc.long()[None])
    path = torch.arange(count, dtype=torch.int32, device=device)
    number = torch.tensor([count], dtype=torch.int32, device=device)
    verdict = Verdict(path, path[None], number - 1, number, torch.zeros(1, count, device=device))
    commit(_request(device), src_loc.long(), verdict, pools)
    for layer, (keys, values) in enumerate(zip(k_buffer, v_buffer, strict=True)):
        keys.copy_(pools.target.keys[layer])
        values.copy_(pools.target.values[layer])


def _request(device) -> Batch:
    """One request of no tokens in row 0."""
    return Batch.of([0], [0], [0], [SamplingParams()], 1).to(device)


def _pool(keys, values, table) -> KVPool:
    """A pool with this KV [layers, slots, heads, D] and this table of slots."""
    buffer = KVBuffer(KVLayout(*keys[:, 0].shape), keys.shape[1], keys.dtype, keys.device)
    buffer.keys.copy_(keys)
    buffer.values.copy_(values)
    pools = KVPool(buffer, None, 1, len(table), table.shape[1] + 2)
    pools.req_to_token[:, : table.shape[1]] = table
    return pools


def assign_extend_cache_locs_func(
    req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device
):
    """The table in the dtype of the column's pools."""
    from specsim.fast.kv import tree_locations

    config = SpecConfig(1, draft_token_num - 1, draft_token_num)
    batch = SimpleNamespace(size=batch_size, req_pool_indices=req_pool_indices, seq_lens=start_offset)
    return tree_locations(batch, config, SimpleNamespace(req_to_token=req_to_token.long())).flatten()


def draft_lane_locations(req_pool_indices, req_to_token, seq_lens, topk, num_steps, page_size):
    """Where draft steps write, and what the copy of tails moves in a pool whose KV are the numbers of its slots."""
    from specsim.fast.kv import duplicate_tails
    from specsim.fast.model.metadata import lane_metadata

    batch_size, device = len(seq_lens), seq_lens.device
    config = SpecConfig(topk, num_steps, num_steps + 1 if topk == 1 else 2, page_size, max_len=_FAR)
    params = [SamplingParams()] * batch_size
    batch = Batch.of(range(batch_size), req_pool_indices.tolist(), seq_lens.tolist(), params, 1).to(device)
    numbers = torch.arange(int(req_to_token.max()) + 2, device=device)
    pools = _pool(*2 * [numbers.float().view(1, -1, 1, 1)], req_to_token)
    pools.draft = pools.target
    duplicate_tails(batch, config, pools)
    moved_to = pools.draft.keys[0, :, 0, 0].long()
    own = req_to_token[req_pool_indices]
    target = own[(own >= 0) & (moved_to != numbers)[own.clamp(min=0)]]
    path = torch.zeros(batch_size, topk, num_steps, dtype=torch.int32, device=device)
    slots = [torch.zeros(0, batch_size, topk, dtype=torch.int64, device=device)]
    for step in range(num_steps):
        lanes = SimpleNamespace(step=torch.tensor([step, 0], dtype=torch.int32, device=device), path=path)
        slots.append(lane_metadata(batch, lanes, config, pools).slots.view(1, batch_size, topk))
    return torch.cat(slots).permute(1, 2, 0).flatten(), moved_to[target], target


def rotate_input_ids_triton(input_ids, extend_start_loc, extend_seq_lens, topk_index):
    """Chunks stand one after the other, so that their starts and one end say where they lie."""
    from specsim.fast.extend import shift_left

    ends = torch.cat([extend_start_loc, (extend_start_loc + extend_seq_lens)[-1:]])
    starts = ends if len(extend_start_loc) else torch.zeros(1, dtype=torch.int64, device=input_ids.device)
    input_ids.copy_(shift_left(PrefillInput(input_ids, starts, extend_start_loc, topk_index), topk_index))


def fill_bonus_tokens(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The tokens of a row stand for the predictions of a chain, whose path they are."""
    from specsim.fast.extend import draft_extend_input

    batch_size, device = len(accept_lens), accept_lens.device
    path = torch.arange(batch_size * accept_stride, dtype=torch.int32, device=device).view(batch_size, accept_stride)
    verdict = Verdict(accept_tokens, path, accept_lens - 1, accept_lens, None)
    batch = Batch.of(range(batch_size), range(batch_size), [0] * batch_size, [SamplingParams()] * batch_size, 1)
    features, table = torch.zeros(len(accept_tokens), 1, device=device), path.long()
    bonus_tokens.copy_(draft_extend_input(batch.to(device), verdict, features, table, _FAR, "fixed").bonus_tokens)


def tree_attention(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, tree_mask, tree_mask_mode, draft_token_num):
    """Every request's slots as a row of the table, the tree's after the prefix's."""
    from specsim.fast.attention import attention
    from specsim.fast.model.metadata import tree_metadata

    device, lens = q.device, kv_indptr.long().diff() - draft_token_num
    batch_size, num_nodes = len(lens), draft_token_num
    table = torch.full((max(1, batch_size), int(lens.max()) + num_nodes if batch_size else 1), -1, device=device)
    for request, (low, high) in enumerate(zip(kv_indptr[:-1].tolist(), kv_indptr[1:].tolist(), strict=True)):
        table[request, : high - low] = kv_indices[low:high]
    columns = lens[:, None] + torch.arange(num_nodes, device=device)
    mask_BNN = _square(tree_mask, tree_mask_mode, lens.tolist(), num_nodes)
    tree = SimpleNamespace(
        draft_tokens=columns, cache_locations=table[:batch_size].gather(1, columns).flatten(),
        positions=columns.flatten(), mask=mask_BNN.contiguous(),
    )  # fmt: skip
    params = [SamplingParams()] * batch_size
    batch = Batch.of(range(batch_size), range(batch_size), lens.tolist(), params, 1).to(device)
    pools = _pool(k_buffer[None], v_buffer[None], table)
    attention(q, 0, pools.target, tree_metadata(batch, tree, pools), None, out=o)


def _square(tree_mask, mode: int, lens: list[int], num_nodes: int) -> torch.Tensor:
    """bool [B, N, N] from any layout."""
    if mode == 0:
        sizes = [num_nodes * (length + num_nodes) for length in lens]
        parts = [part.view(num_nodes, -1)[:, -num_nodes:] for part in tree_mask.split(sizes)]
        return torch.stack(parts) if parts else tree_mask.view(0, num_nodes, num_nodes)
    if mode == 1:
        return tree_mask.view(-1, num_nodes, num_nodes)
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tree_mask.element_size()]
    words = tree_mask.view(signed).long().view(-1, num_nodes, 1)
    return (words >> torch.arange(num_nodes, device=tree_mask.device)) & 1 == 1
