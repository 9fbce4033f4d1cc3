"""Frozen-KV drafter: layers with queries only, which read the keys and values of the target's last layer.

Every step of a draft from position r reads the columns ≤ r and has rope position r; no draft writes a key. A row takes
the target's embedding of its token and a hidden: at first what the target's lm_head reads, then the drafter's own
`post_projection`. Source: the assistant models of Gemma 4.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from specsim.training.attention import Rope, rope_at
from specsim.training.drafter import DrafterModule, Drafts, Roots, drafts_of_rows, llama_fields
from specsim.training.options import TrainingOptions
from specsim.training.target import TargetReading


class FrozenAttention(nn.Module):
    """Attention of row r to the target's keys of columns ≤ r."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        width = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x_BRH: torch.Tensor, rope: Rope, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        query = self.q_proj(x_BRH).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, _ = apply_rotary_pos_emb(query, query, *rope)
        output_BARD = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        return self.o_proj(output_BARD.transpose(1, 2).flatten(2))


class FrozenLayer(nn.Module):
    """A Llama layer without keys and values of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn = FrozenAttention(config)
        self.mlp = LlamaMLP(config)

    def forward(self, x_BRH: torch.Tensor, rope: Rope, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x_BRH = x_BRH + self.self_attn(self.input_layernorm(x_BRH), rope, keys, values)
        return x_BRH + self.mlp(self.post_attention_layernorm(x_BRH))


class FrozenKv(DrafterModule):
    """A stack of such layers with an lm_head of its own; the embedding is the target's."""

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.config = config
        backbone = config.backbone_hidden_size
        self.pre_projection = nn.Linear(2 * backbone, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(FrozenLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_projection = nn.Linear(config.hidden_size, backbone, bias=False)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.borrowed = {"embed_tokens": target.model.embed_tokens}
        if config.hidden_size == backbone:
            self.lm_head.weight.data.copy_(target.lm_head.weight)

    def drafts(self, reading: TargetReading, tokens_BC: torch.Tensor, roots: Roots, num_drafts: int) -> list[Drafts]:
        num_rows = tokens_BC.shape[1] - num_drafts
        groups = self.config.num_attention_heads // reading.keys_BKCD.shape[1]
        keys, values = (repeat_kv(kv[:, :, :num_rows], groups) for kv in (reading.keys_BKCD, reading.values_BKCD))
        hidden_BRH = reading.hidden_BCH[:, :num_rows]
        rope = rope_at(self.rotary, hidden_BRH, 0)
        logits = []
        for step in range(num_drafts):
            embedding_BRH = self.borrowed["embed_tokens"](tokens_BC[:, step + 1 : step + 1 + num_rows])
            x_BRH = self.pre_projection(torch.cat([embedding_BRH, hidden_BRH], -1))
            for layer in self.layers:
                x_BRH = layer(x_BRH, rope, keys, values)
            x_BRH = self.norm(x_BRH)
            hidden_BRH = self.post_projection(x_BRH)
            logits.append(self.lm_head(x_BRH))
        return drafts_of_rows(logits)


def build_frozen_kv(target: LlamaForCausalLM, tokens: torch.Tensor, options: TrainingOptions) -> FrozenKv:
    """Build an untrained drafter whose heads have the target's width."""
    size = target.config.hidden_size
    fields = llama_fields(
        target,
        architectures=["LlamaForCausalLMFrozenKV"],
        backbone_hidden_size=size,
        hidden_size=size,
        num_hidden_layers=options.num_layers,
        intermediate_size=options.intermediate_size or target.config.intermediate_size,
        position="last",
    )
    return FrozenKv(LlamaConfig(**fields), target)
