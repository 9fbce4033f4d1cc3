"""EAGLE and EAGLE-3 heads as modules with the parameter names of published files.

B windows · R rows of a window · V vocabulary · H hidden · A attention heads · D head dim · I input width of attention.
The row that consumes token r + 1 and the hidden of position r is row r, at rope position r.
Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840) and its training-time test.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

Memory = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values [B, A, R, D] of each unrolled step
Rope = tuple[torch.Tensor, torch.Tensor]  # cos and sin [1, R, D]


@dataclass(frozen=True, slots=True)
class Features:
    """A target's outputs that drafters read."""

    last_BCH: torch.Tensor  # input of lm_head
    aux_BCF: torch.Tensor  # hidden states that enter the feature layers
    logits_BCV: torch.Tensor


class UnrolledAttention(nn.Module):
    """Attention of unrolled step i, whose row r is the draft i tokens after the root of row r.

    It sees the keys of step 0 at rows ≤ r (the committed prefix) and its own path, row r of steps 1..i.
    """

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        num_heads = config.num_attention_heads
        num_kv_heads = config.num_key_value_heads or num_heads
        self.head_dim = config.head_dim or config.hidden_size // num_heads
        self.groups = num_heads // num_kv_heads
        width = num_heads * self.head_dim
        kv_width = num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x_BRI: torch.Tensor, rope: Rope, memory: Memory) -> torch.Tensor:
        """Attend, and append this step's keys and values to `memory`."""
        query, key, value = (
            projection(x_BRI).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rope)
        memory.append((repeat_kv(key, self.groups), repeat_kv(value, self.groups)))
        output_BARD = _attend(query * self.head_dim**-0.5, *zip(*memory, strict=True))
        return self.o_proj(output_BARD.transpose(1, 2).flatten(2))


def _attend(query: torch.Tensor, keys: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Attend to the prefix as one block, and merge it with the row's own path by the block's log-sum-exp."""
    future = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ keys[0].transpose(2, 3)).float().masked_fill(future, float("-inf"))
    prefix = scores.softmax(-1).to(values[0].dtype) @ values[0]
    own_scores = [(query * key).sum(-1, keepdim=True).float() for key in keys[1:]]
    weights = torch.cat([scores.logsumexp(-1, keepdim=True), *own_scores], -1).softmax(-1).to(values[0].dtype)
    output = weights[..., 0, None] * prefix
    for step, value in enumerate(values[1:], 1):
        output = output + weights[..., step, None] * value
    return output


class EagleLayer(nn.Module):
    """A Llama layer without its first norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = UnrolledAttention(config, config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x_BRH: torch.Tensor, rope: Rope, memory: Memory) -> torch.Tensor:
        x_BRH = x_BRH + self.self_attn(x_BRH, rope, memory)
        return x_BRH + self.mlp(self.post_attention_layernorm(x_BRH))


class UnrolledHead(nn.Module, ABC):
    """An EAGLE head, called with tokens [B, R], hiddens [B, R, H], the first row's position, and the memory."""

    config: LlamaConfig

    @property
    def feature_layers(self) -> list[int]:
        """Target layers whose entering hidden states the head reads; none for EAGLE-1/2."""
        return list(getattr(self.config, "eagle_aux_hidden_state_layer_ids", None) or ())

    @property
    @abstractmethod
    def vocabulary(self) -> torch.Tensor:
        """Target ids of the draft ids."""

    @abstractmethod
    def first_hidden(self, features: Features) -> torch.Tensor:
        """Hidden [B, C, H] that the first step reads."""

    @property
    @abstractmethod
    def readout(self) -> tuple[nn.Module, nn.Module]:
        """Norm and lm_head that turn a hidden into logits of the draft ids."""


class UnrolledEagleHead(UnrolledHead):
    """EAGLE-1/2: predicts the tensor that the target's lm_head reads, and borrows that lm_head."""

    def __init__(self, config: LlamaConfig, target_head: nn.Linear) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.rotary = LlamaRotaryEmbedding(config)
        self.borrowed = {"lm_head": target_head}
        self.embed_tokens.weight.data.copy_(target_head.weight)

    @property
    def vocabulary(self) -> torch.Tensor:
        return torch.arange(self.embed_tokens.num_embeddings, device=self.fc.weight.device)

    def first_hidden(self, features: Features) -> torch.Tensor:
        return features.last_BCH

    def forward(
        self, token_BR: torch.Tensor, hidden_BRH: torch.Tensor, first_position: int, memory: Memory
    ) -> torch.Tensor:
        x_BRH = self.fc(torch.cat([self.embed_tokens(token_BR), hidden_BRH], -1))
        return self.layers[0](x_BRH, rope_at(self.rotary, x_BRH, first_position), memory)

    @property
    def readout(self) -> tuple[nn.Module, nn.Module]:
        return nn.Identity(), self.borrowed["lm_head"]


class Eagle3Layer(nn.Module):
    """A Llama layer with attention over the token's embedding and the hidden, each under its own norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = UnrolledAttention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embedding_BRH: torch.Tensor, hidden_BRH: torch.Tensor, rope: Rope, memory: Memory
    ) -> torch.Tensor:
        x_BRI = torch.cat([self.input_layernorm(embedding_BRH), self.hidden_norm(hidden_BRH)], -1)
        hidden_BRH = hidden_BRH + self.self_attn(x_BRI, rope, memory)
        return hidden_BRH + self.mlp(self.post_attention_layernorm(hidden_BRH))


class UnrolledEagle3Head(UnrolledHead):
    """EAGLE-3: reads features of three of the target's layers and has a smaller vocabulary of its own."""

    d2t: torch.Tensor  # i64 [draft vocabulary], offset from a draft id to its target id
    t2d: torch.Tensor  # bool [V], whether a target id has a draft id

    def __init__(self, config: LlamaConfig, target_embedding: nn.Embedding, draft_ids: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        num_features = len(config.eagle_aux_hidden_state_layer_ids)
        self.fc = nn.Linear(num_features * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.borrowed = {"embed_tokens": target_embedding}
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))
        is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool, device=draft_ids.device)
        self.register_buffer("t2d", is_drafted.index_fill(0, draft_ids, True))
        self.lm_head.weight.data.copy_(target_embedding.weight[draft_ids])

    @property
    def vocabulary(self) -> torch.Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def first_hidden(self, features: Features) -> torch.Tensor:
        return self.fc(features.aux_BCF)

    def forward(
        self, token_BR: torch.Tensor, hidden_BRH: torch.Tensor, first_position: int, memory: Memory
    ) -> torch.Tensor:
        embedding_BRH = self.borrowed["embed_tokens"](token_BR)
        return self.midlayer(embedding_BRH, hidden_BRH, rope_at(self.rotary, hidden_BRH, first_position), memory)

    @property
    def readout(self) -> tuple[nn.Module, nn.Module]:
        return self.norm, self.lm_head


def rope_at(rotary: LlamaRotaryEmbedding, x_BRH: torch.Tensor, first_position: int) -> Rope:
    """Rotate rows at consecutive positions: their cos and sin."""
    return rotary(x_BRH, torch.arange(first_position, first_position + x_BRH.shape[1], device=x_BRH.device)[None])
