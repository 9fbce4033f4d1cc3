"""KV of a round: copied prefix tails, slots of the tree, and the commit of the accepted path."""

import torch

from specsim.core.columns import tail_columns
from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict
from specsim.core.pool import KVBuffer, KVPool


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
