"""Multi-token prediction: a chain of modules, each of which predicts one token further ahead.

Module k, row p: x = eh_proj(enorm(embedding of token p+1+k) ⊕ hnorm(g_k(p))), a Llama layer over rows ≤ p with keys of
its own, a norm, and the target's lm_head, which gives token p+2+k. g_0 is what the target's lm_head reads; g_k is the
normed output of module k-1. Source: DeepSeek-V3 (arXiv 2412.19437).
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

from specsim.maintain.training.recipe import Recipe
from specsim.maintain.training.student import Reading, Student
from specsim.training.heads import Rope, rope_at


class CausalAttention(nn.Module):
    """Attention of rows to themselves and to earlier rows."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        num_kv_heads = config.num_key_value_heads or config.num_attention_heads
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.groups = config.num_attention_heads // num_kv_heads
        width = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x_BRH: torch.Tensor, rope: Rope) -> torch.Tensor:
        query, key, value = (
            projection(x_BRH).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rope)
        key, value = (repeat_kv(tensor, self.groups) for tensor in (key, value))
        output_BARD = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(output_BARD.transpose(1, 2).flatten(2))


class MtpModule(nn.Module):
    """One module: a token's embedding and a hidden in, a normed hidden out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.input_layernorm, self.post_attention_layernorm, self.norm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(5)
        )
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn = CausalAttention(config)
        self.mlp = LlamaMLP(config)

    def forward(self, embedding_BRH: torch.Tensor, hidden_BRH: torch.Tensor, rope: Rope) -> torch.Tensor:
        x_BRH = self.eh_proj(torch.cat([self.enorm(embedding_BRH), self.hnorm(hidden_BRH)], -1))
        x_BRH = x_BRH + self.self_attn(self.input_layernorm(x_BRH), rope)
        x_BRH = x_BRH + self.mlp(self.post_attention_layernorm(x_BRH))
        return self.norm(x_BRH)


class Mtp(Student):
    """A chain of MTP modules; embedding and lm_head are the target's."""

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.config = config
        self.chain = nn.ModuleList(MtpModule(config) for _ in range(config.num_nextn_predict_layers))
        self.rotary = LlamaRotaryEmbedding(config)
        self.borrowed = {"embed_tokens": target.model.embed_tokens, "lm_head": target.lm_head}

    def unroll(self, reading: Reading, tokens_BC: torch.Tensor, steps: int) -> list[torch.Tensor]:
        rows = tokens_BC.shape[1] - steps
        hidden_BRH = reading.hidden_BCH[:, :rows]
        rope = rope_at(self.rotary, hidden_BRH, 0)
        logits = []
        for depth in range(steps):
            embedding_BRH = self.borrowed["embed_tokens"](tokens_BC[:, depth + 1 : depth + 1 + rows])
            hidden_BRH = self.chain[depth](embedding_BRH, hidden_BRH, rope)
            logits.append(self.borrowed["lm_head"](hidden_BRH))
        return logits

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"modules.{name.removeprefix('chain.')}": value for name, value in self.state_dict().items()}


def build_mtp(target: LlamaForCausalLM, recipe: Recipe) -> Mtp:
    """Build an untrained chain with the target's sizes."""
    own = {
        "architectures": ["LlamaForCausalLMMtp"],
        "num_nextn_predict_layers": recipe.num_mtp_modules,
        "num_hidden_layers": 1,
        "intermediate_size": recipe.mtp_intermediate_size,
        "tie_word_embeddings": False,
    }
    return Mtp(LlamaConfig(**{**target.config.to_dict(), **own}), target)
