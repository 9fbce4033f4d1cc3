"""Attention of rows that draft in parallel, to the context before their root and to their own block.

B windows · C columns of the context · A roots of a window · S rows of a block · N rows · I input width · K heads ·
D head dim. Block i of a window has its root at column roots[i], sees the columns before it, and its row j has rope
position roots[i] + j.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, repeat_kv

from specsim.training.heads import Rope


class Blocks(NamedTuple):
    """Blocks of rows after roots, and what they see of one another."""

    roots_BA: torch.Tensor  # i64, first column that a block does not see
    seen_BASS: torch.Tensor  # bool, whether row i of a block sees its row j

    @property
    def positions(self) -> torch.Tensor:
        """List the rope positions of all rows, [B, N]."""
        rows = torch.arange(self.seen_BASS.shape[-1], device=self.roots_BA.device)
        return (self.roots_BA[..., None] + rows).flatten(1)


class Heads(NamedTuple):
    """Queries, keys and values [B, K, N, D] of rows."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class BlockAttention(nn.Module):
    """Projections of an attention, with norms of each head's queries and keys where Qwen3 has them."""

    def __init__(self, config: PretrainedConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        self.groups: int = config.num_attention_heads // config.num_key_value_heads
        width = config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
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

    def attend_context(self, own: Heads) -> torch.Tensor:
        """Attend from each row of the context to itself and the rows before it: [B, C, H]."""
        output_BKCD = F.scaled_dot_product_attention(own.query, own.key, own.value, is_causal=True)
        return self.o_proj(output_BKCD.transpose(1, 2).flatten(2))

    def attend_blocks(self, own: Heads, context: Heads, blocks: Blocks) -> torch.Tensor:
        """Attend from each row of the blocks to the context before its root and to its block: [B, N, H]."""
        shape = blocks.seen_BASS.shape[1:3]
        query = own.query * self.head_dim**-0.5
        columns_C = torch.arange(context.key.shape[2], device=query.device)
        hidden_BAC = columns_C >= blocks.roots_BA[..., None]
        before = (query @ context.key.transpose(2, 3)).float().unflatten(2, shape)
        before = before.masked_fill(hidden_BAC[:, None, :, None], float("-inf"))
        key, value = (each.unflatten(2, shape) for each in (own.key, own.value))
        within = (query.unflatten(2, shape) @ key.transpose(3, 4)).float()
        within = within.masked_fill(~blocks.seen_BASS[:, None], float("-inf"))
        total = torch.logaddexp(*(each.logsumexp(-1, keepdim=True) for each in (before, within)))
        of_context, of_block = ((each - total).exp().to(value.dtype) for each in (before, within))
        output = of_context.flatten(2, 3) @ context.value + (of_block @ value).flatten(2, 3)
        return self.o_proj(output.transpose(1, 2).flatten(2))
