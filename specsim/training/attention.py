"""Attention of drafters in training: causal over a window, along an unrolled path, and of blocks after roots.

B windows · C columns of the context · A roots of a window · S rows of a block · N rows · R rows of an unrolled step ·
I input width · K heads · D head dim · H hidden.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

Rope = tuple[torch.Tensor, torch.Tensor]  # cos and sin [1 or B, N, D]
Memory = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values [B, K, R, D] of each unrolled step


class Heads(NamedTuple):
    """Queries, keys and values [B, K, N, D] of rows."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Blocks(NamedTuple):
    """Blocks of rows after roots: block i has rope positions from roots[i] on and sees the columns before roots[i]."""

    roots_BA: torch.Tensor  # i64, first column that a block does not see
    seen_BASS: torch.Tensor  # bool, whether row i of a block sees its row j

    @property
    def positions(self) -> torch.Tensor:
        """List the rope positions of all rows, [B, N]."""
        rows = torch.arange(self.seen_BASS.shape[-1], device=self.roots_BA.device)
        return (self.roots_BA[..., None] + rows).flatten(1)


class DrafterAttention(nn.Module):
    """Projections of an attention, with norms of each head's queries and keys where Qwen3 has them."""

    def __init__(self, config: PretrainedConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_kv_heads = config.num_key_value_heads or config.num_attention_heads
        self.groups: int = config.num_attention_heads // num_kv_heads
        width = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        if config.model_type == "qwen3":
            self.q_norm, self.k_norm = (LlamaRMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

    def heads(self, x_BNI: torch.Tensor, rope: Rope) -> Heads:
        """Project rows and rotate them."""
        query, key, value = (
            projection(x_BNI).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rope)
        return Heads(query, repeat_kv(key, self.groups), repeat_kv(value.transpose(1, 2), self.groups))

    def attend_causally(self, rows: Heads) -> torch.Tensor:
        """Attend from each row to itself and the rows before it: [B, N, H]."""
        output_BKND = F.scaled_dot_product_attention(rows.query, rows.key, rows.value, is_causal=True)
        return self.o_proj(output_BKND.transpose(1, 2).flatten(2))

    def attend_path(self, rows: Heads, memory: Memory) -> torch.Tensor:
        """Attend from unrolled step i, whose row r drafts i tokens after its root: [B, R, H].

        It sees the keys of step 0 at rows ≤ r (the committed prefix) and its own path, row r of steps 1..i. The step's
        keys and values are appended to `memory`. The prefix is one block, merged with the path by its log-sum-exp.
        """
        memory.append((rows.key, rows.value))
        query = rows.query * self.head_dim**-0.5
        (first_key, first_value), *path = memory
        future = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ first_key.transpose(2, 3)).float().masked_fill(future, float("-inf"))
        prefix = scores.softmax(-1).to(first_value.dtype) @ first_value
        path_scores = [(query * key).sum(-1, keepdim=True).float() for key, _ in path]
        total = torch.cat([scores.logsumexp(-1, keepdim=True), *path_scores], -1).softmax(-1).to(first_value.dtype)
        output = total[..., 0, None] * prefix
        for step, (_, value) in enumerate(path, 1):
            output = output + total[..., step, None] * value
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def attend_blocks(self, rows: Heads, context: Heads, blocks: Blocks) -> torch.Tensor:
        """Attend from each row of the blocks to the context before its root and to its block: [B, N, H]."""
        shape = blocks.seen_BASS.shape[1:3]
        query = rows.query * self.head_dim**-0.5
        columns_C = torch.arange(context.key.shape[2], device=query.device)
        hidden_BAC = columns_C >= blocks.roots_BA[..., None]
        before = (query @ context.key.transpose(2, 3)).float().unflatten(2, shape)
        before = before.masked_fill(hidden_BAC[:, None, :, None], float("-inf"))
        key, value = (tensor.unflatten(2, shape) for tensor in (rows.key, rows.value))
        within = (query.unflatten(2, shape) @ key.transpose(3, 4)).float()
        within = within.masked_fill(~blocks.seen_BASS[:, None], float("-inf"))
        total = torch.logaddexp(*(scores.logsumexp(-1, keepdim=True) for scores in (before, within)))
        of_context, of_block = ((scores - total).exp().to(value.dtype) for scores in (before, within))
        output = of_context.flatten(2, 3) @ context.value + (of_block @ value).flatten(2, 3)
        return self.o_proj(output.transpose(1, 2).flatten(2))


def rope_at(rotary: LlamaRotaryEmbedding, x_BRH: torch.Tensor, first_position: int) -> Rope:
    """Compute cos and sin of rows at consecutive positions."""
    return rotary(x_BRH, torch.arange(first_position, first_position + x_BRH.shape[1], device=x_BRH.device)[None])
