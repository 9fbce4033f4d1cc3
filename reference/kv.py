"""KV of a round: copied prefix tails, the tree's slots, the commit of the accepted path, draft-extend's rows."""

from dataclasses import replace

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, DraftExtendInput, PrefillInput, Verdict
from specsim.core.pool import KVBuffer, KVPool, tail_columns


def draft_kv(pools: KVPool) -> KVBuffer:
    """Return the drafter's KV, or raise ValueError where the pools have none."""
    if pools.draft is None:
        raise ValueError("the pools have no KV buffer for the drafter: make them with this engine's make_pools")
    return pools.draft


def duplicate_tails(batch: Batch, config: SpecConfig, pools: KVPool, bonus_columns: int = 0) -> None:
    """Copy the prefix tail's draft KV, content and not indices (sglang#7725), to lanes 1..K-1 before drafting.

    The drafter's prefix has L + bonus_columns columns.
    """
    if pools.draft is None:
        return
    for row, length in batch.rows_and_lens:
        slots = pools.slots(row, tail_columns(length + bonus_columns, config))
        pools.draft.move(slots[:1].expand_as(slots[1:]).flatten(), slots[1:].flatten())


def tree_locations(batch: Batch, config: SpecConfig, pools: KVPool) -> torch.Tensor:
    """Slots i64 [B, N] of the tree's columns L..L+N-1."""
    columns_BN = batch.seq_lens[:, None] + torch.arange(config.num_draft_tokens)
    return pools.slots(batch.req_pool_indices[:, None], columns_BN)


def commit(batch: Batch, cache_locations: torch.Tensor, verdict: Verdict, pools: KVPool) -> None:
    """Move target KV and side outputs of the accepted path to columns L..L+n, reading all of it before writing."""
    for (row, length), path in zip(batch.rows_and_lens, verdict.accept_index, strict=True):
        nodes = path[path >= 0].long()
        columns = length + torch.arange(len(nodes))
        destination = pools.slots(row, columns)
        pools.target.move(cache_locations[nodes], destination)
        pools.side.move(cache_locations[nodes], destination)


def record_tokens(batch: Batch, verdict: Verdict, pools: KVPool) -> None:
    """Record the accepted tokens, bonus last, at columns L+1..L+n+1."""
    for (row, length), tokens in zip(batch.rows_and_lens, verdict.accepted_tokens(), strict=True):
        pools.record(row, length + 1 + torch.arange(len(tokens)), torch.tensor(tokens))


def shift_left(prefill: PrefillInput, next_tokens: torch.Tensor) -> torch.Tensor:
    """Shift the ids of each chunk left by one, i64 [R], and append the token after the chunk (sglang#26329)."""
    shifted = prefill.input_ids.roll(-1)
    shifted[prefill.last_rows] = next_tokens.long()
    return shifted


def draft_rows(prefill: PrefillInput, next_tokens: torch.Tensor, bonus_columns: int) -> PrefillInput:
    """Rows of the drafter after a prefill.

    Without a bonus column each column has the token after it. With one, each has its own token, and a request has one
    row more, the token after its chunk.
    """
    if bonus_columns == 0:
        return replace(prefill, input_ids=shift_left(prefill, next_tokens))
    chunks = prefill.input_ids.split(prefill.row_starts.diff().tolist())
    input_ids = [part for chunk, token in zip(chunks, next_tokens.long(), strict=True) for part in (chunk, token[None])]
    row_starts = prefill.row_starts + torch.arange(len(prefill.row_starts))
    input_ids_R = torch.cat([prefill.input_ids[:0], *input_ids])
    return replace(prefill, input_ids=input_ids_R, row_starts=row_starts, max_rows=None)


def draft_extend_input(
    batch: Batch,
    verdict: Verdict,
    features_RF: torch.Tensor,
    req_to_token: torch.Tensor,
    max_len: int,
    extend: str,
    bonus_columns: int = 0,
) -> DraftExtendInput:
    """Gather along the accepted path: row j holds node accept_index[b, j]'s features and the token *after* that node.

    extend `fixed`: S+1 rows for each request; those past the path have token 0 and the features of node 0. `ragged`:
    the path's rows only. A row without a slot, or at or beyond max_len, writes nothing. Row j stands in column
    L + bonus_columns + j.
    """
    size, width = verdict.accept_index.shape
    num_nodes = len(verdict.predict) // size if size else 0
    steps = torch.arange(width)
    live = steps < verdict.num_accepted_tokens[:, None]
    root = torch.arange(size)[:, None] * num_nodes
    nodes = torch.where(live, verdict.accept_index.long(), root)
    ids = torch.where(live, verdict.predict[nodes].long(), 0)
    positions = batch.seq_lens[:, None] + bonus_columns + steps
    slots = req_to_token[batch.req_pool_indices[:, None], positions]
    slots = torch.where(positions < max_len, slots, -1)
    is_row = live if extend == "ragged" else torch.ones_like(live)
    return DraftExtendInput(
        row_starts=torch.nn.functional.pad(is_row.sum(1).cumsum(0), (1, 0)),
        hidden=features_RF[nodes[is_row]],
        input_ids=ids[is_row],
        positions=positions[is_row],
        cache_locations=slots[is_row],
        num_accepted_drafts=verdict.num_accepted_drafts,
        num_accepted_tokens=verdict.num_accepted_tokens,
        bonus_tokens=ids[torch.arange(size), verdict.num_accepted_drafts.long()].int(),
        seq_lens=batch.seq_lens,
        req_pool_indices=batch.req_pool_indices,
    )
