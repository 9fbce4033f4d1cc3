"""A module like a third party's: every operation under its public name, in plain loops, without specsim."""

from itertools import pairwise

import torch


def fast_topk(values, topk, dim):
    ranked = torch.where(values.isnan(), torch.inf, values)
    order = torch.sort(ranked, dim=dim, descending=True, stable=True).indices
    nan_first = torch.sort(values.isnan().gather(dim, order).int(), dim=dim, descending=True, stable=True).indices
    chosen = order.gather(dim, nan_first)[:, :topk]
    return values.gather(dim, chosen), chosen


def select_top_k_tokens(i, topk_p, topk_index, hidden_states, scores, topk):
    if i == 0:
        parents = torch.arange(-1, topk).repeat(len(topk_p), 1)
        tree = topk_p[:, None], topk_index, parents
        return topk_index.flatten(), hidden_states.repeat_interleave(topk, dim=0), topk_p, tree
    children = scores[:, :, None] * topk_p.view(-1, topk, topk)
    lane_scores, chosen = fast_topk(children.flatten(1), topk, -1)
    tokens = topk_index.view(-1, topk * topk)
    rows = torch.arange(len(chosen))[:, None] * topk + chosen // topk
    parents = chosen + topk + topk * topk * (i - 1)
    hidden = hidden_states[rows.flatten()]
    return tokens.gather(1, chosen).flatten(), hidden, lane_scores, (children, tokens, parents)


def organize_draft_results(score_list, token_list, parents_list, num_draft_token):
    scores = torch.cat([each.flatten(1) for each in score_list], dim=1)
    chosen = fast_topk(scores, num_draft_token - 1, -1)[1].sort(dim=-1).values
    tokens = torch.cat(token_list, dim=1).gather(1, chosen)
    return torch.cat(parents_list[:-1], dim=1) if len(parents_list) > 1 else scores[:, :0], chosen, tokens


def build_tree_kernel_efficient(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index, retrive_next_token,
    retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    n, start = draft_token_num, 0
    for b, length in enumerate(verified_seq_len.tolist()):
        chosen, above = selected_index[b].tolist(), [-1]
        for flat in chosen:
            block = flat // topk
            above.append(0 if block == 0 else 1 + chosen.index(int(parent_list[b, block])))
        for node in range(n):
            seen, last = [], node
            while last >= 0 and len(seen) < n:
                seen.append(last)
                last = above[last]
            positions[b * n + node] = length + len(seen) - 1
            retrive_index[b, node] = b * n + node
            children = [other for other in range(n) if above[other] == node]
            retrive_next_token[b, node] = children[0] if children else -1
            for older, younger in pairwise(children):
                retrive_next_sibling[b, older] = younger
            if tree_mask_mode == 0:
                first = start + node * (length + n) + length
                tree_mask[first : first + n] = torch.tensor([other in seen for other in range(n)])
            elif tree_mask_mode == 1:
                first = (b * n + node) * n
                tree_mask[first : first + n] = torch.tensor([other in seen for other in range(n)])
            else:
                tree_mask[b * n + node] = sum(1 << other for other in seen)
        start += n * (length + n)


def verify_tree_greedy(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    best = target_predict.flatten()
    for b in range(len(candidates)):
        node = 0
        count = 0
        accept_index[b, 0] = retrive_index[b, 0]
        while True:
            wanted = best[retrive_index[b, node]]
            predicts[retrive_index[b, node]] = wanted
            child = int(retrive_next_token[b, node])
            for _ in range(candidates.shape[1]):
                if child < 0 or candidates[b, child] == wanted:
                    break
                child = int(retrive_next_sibling[b, child])
            else:
                raise ValueError(f"request {b}: siblings in a circle")
            if child < 0 or count + 1 == accept_index.shape[1]:
                break
            node, count = child, count + 1
            accept_index[b, count] = retrive_index[b, node]
        accept_token_num[b] = count


def tree_speculative_sampling_target_only(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single=1.0,
    threshold_acc=1.0, deterministic=True,
):  # fmt: skip
    for b in range(len(candidates)):
        node = 0
        count = 0
        accept_index[b, 0] = retrive_index[b, 0]
        while True:
            weights, uniform, held = target_probs[b, node].clone(), uniform_samples[b, node], 0.0
            child = int(retrive_next_token[b, node]) if count + 1 < accept_index.shape[1] else -1
            while child >= 0:
                token = int(candidates[b, child])
                chance = float(weights[token])
                held += chance
                if uniform <= held / max(threshold_acc, 1e-9) or chance >= threshold_single:
                    break
                weights[token] = 0.0
                child = int(retrive_next_sibling[b, child])
            if child < 0:
                break
            predicts[retrive_index[b, node]] = token
            node, count = child, count + 1
            accept_index[b, count] = retrive_index[b, node]
        weights = weights if weights.sum() > 0 else target_probs[b, node]
        sums = weights.cumsum(0)
        drawn = (sums > uniform_samples_for_final_sampling[b] * sums[-1]) & (weights > 0)
        predicts[retrive_index[b, node]] = int(drawn.nonzero()[0])
        accept_token_num[b] = count


def fill_bonus_tokens(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    for b, length in enumerate(accept_lens.tolist()):
        bonus_tokens[b] = accept_tokens[b * accept_stride + length - 1]


def move_kv_cache_native(k_buffer, v_buffer, tgt_loc, src_loc):
    for keys, values in zip(k_buffer, v_buffer, strict=True):
        keys[tgt_loc] = keys[src_loc]
        values[tgt_loc] = values[src_loc]


def assign_extend_cache_locs_func(
    req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device
):
    out = torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=device)
    for b in range(batch_size):
        own = req_to_token[req_pool_indices[b], start_offset[b] : end_offset[b]]
        out[b * draft_token_num : (b + 1) * draft_token_num] = own
    return out


def draft_lane_locations(req_pool_indices, req_to_token, seq_lens, topk, num_steps, page_size):
    shared = page_size == 1 or topk == 1
    lanes, source, target = [], [], []
    for row, length in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        tail = 0 if shared else length % page_size
        stride = num_steps if shared else -(-(tail + num_steps) // page_size) * page_size
        for lane in range(topk):
            first = length + lane * stride
            lanes.append(req_to_token[row, first : first + num_steps])
            if lane > 0:
                target.append(req_to_token[row, first - tail : first])
                source.append(req_to_token[row, length - tail : length])
    none = req_to_token.new_empty(0)
    return torch.cat([none, *lanes]), torch.cat([none, *source]), torch.cat([none, *target])


def rotate_input_ids_triton(input_ids, extend_start_loc, extend_seq_lens, topk_index):
    for b, (first, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        input_ids[first : first + length - 1] = input_ids[first + 1 : first + length].clone()
        input_ids[first + length - 1] = topk_index[b]
    return input_ids


def tree_attention(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, tree_mask, tree_mask_mode, draft_token_num):
    n, start, group = draft_token_num, 0, q.shape[1] // k_buffer.shape[1]
    for b in range(len(kv_indptr) - 1):
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        length = len(slots) - n
        for node in range(n):
            if tree_mask_mode == 0:
                first = start + node * (length + n) + length
                seen = tree_mask[first : first + n]
            elif tree_mask_mode == 1:
                seen = tree_mask[(b * n + node) * n :][:n]
            else:
                word = int(tree_mask[b * n + node].item())
                seen = torch.tensor([word >> other & 1 == 1 for other in range(n)])
            kept = torch.cat([slots[:length], slots[length:][seen]])
            keys = k_buffer[kept].repeat_interleave(group, dim=1)
            values = v_buffer[kept].repeat_interleave(group, dim=1)
            weights = (torch.einsum("ad,cad->ac", q[b * n + node], keys) / q.shape[-1] ** 0.5).softmax(-1)
            o[b * n + node] = torch.einsum("ac,cad->ad", weights, values)
        start += n * (length + n)


def rejection_sample(
    draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_probs, bonus_token_ids,
    sampling_metadata,
):  # fmt: skip
    out = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32)
    uniforms = torch.rand(len(draft_token_ids), dtype=torch.float64).tolist()
    noise = -torch.rand(len(draft_token_ids), target_probs.shape[-1], dtype=torch.float64).log()
    for b, (end, count) in enumerate(zip(cu_num_draft_tokens.tolist(), num_draft_tokens, strict=True)):
        for place, row in enumerate(range(end - count, end)):
            token, weights = int(draft_token_ids[row]), target_probs[row]
            if sampling_metadata.temperature[b] == 0:
                kept, other = token == int(weights.argmax()), int(weights.argmax())
            else:
                points = [float(token == other) for other in range(len(weights))]
                draft = torch.tensor(points) if draft_probs is None else draft_probs[row]
                kept = token >= 0 and uniforms[row] * float(draft[token]) < float(weights[token])
                other = int(((weights - draft).clamp(min=0) / noise[row]).argmax())
            out[b, place] = token if kept else other
            if not kept:
                break
        else:
            out[b, count] = bonus_token_ids[b, 0]
    return out
