"""Multi-token prediction: a chain of modules, each of which predicts one token further ahead.

Module k, row p: x = eh_proj(enorm(embedding of token p+1+k) ⊕ hnorm(g_k(p))), a Llama layer over rows ≤ p with keys of
its own, a norm, and the target's lm_head, which gives token p+2+k. g_0 is what the target's lm_head reads; g_k is the
normed output of module k-1. Source: DeepSeek-V3 (arXiv 2412.19437).
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from specsim.training.attention import DrafterAttention, Rope, rope_at
from specsim.training.drafter import DrafterModule, Drafts, Roots, drafts_of_rows, llama_fields
from specsim.training.options import TrainingOptions
from specsim.training.target import TargetReading


class MtpLayer(nn.Module):
    """One module: a token's embedding and a hidden in, a normed hidden out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.input_layernorm, self.post_attention_layernorm, self.norm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(5)
        )
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn = DrafterAttention(config, config.hidden_size)
        self.mlp = LlamaMLP(config)

    def forward(self, embedding_BRH: torch.Tensor, hidden_BRH: torch.Tensor, rope: Rope) -> torch.Tensor:
        x_BRH = self.eh_proj(torch.cat([self.enorm(embedding_BRH), self.hnorm(hidden_BRH)], -1))
        x_BRH = x_BRH + self.self_attn.attend_causally(self.self_attn.heads(self.input_layernorm(x_BRH), rope))
        x_BRH = x_BRH + self.mlp(self.post_attention_layernorm(x_BRH))
        return self.norm(x_BRH)


class Mtp(DrafterModule):
    """A chain of MTP modules; embedding and lm_head are the target's."""

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.config = config
        self.max_drafts = config.num_nextn_predict_layers
        self.chain = nn.ModuleList(MtpLayer(config) for _ in range(config.num_nextn_predict_layers))
        self.rotary = LlamaRotaryEmbedding(config)
        self.borrowed = {"embed_tokens": target.model.embed_tokens, "lm_head": target.lm_head}

    def drafts(self, reading: TargetReading, tokens_BC: torch.Tensor, roots: Roots, num_drafts: int) -> list[Drafts]:
        num_rows = tokens_BC.shape[1] - num_drafts
        hidden_BRH = reading.hidden_BCH[:, :num_rows]
        rope = rope_at(self.rotary, hidden_BRH, 0)
        logits = []
        for step in range(num_drafts):
            embedding_BRH = self.borrowed["embed_tokens"](tokens_BC[:, step + 1 : step + 1 + num_rows])
            hidden_BRH = self.chain[step](embedding_BRH, hidden_BRH, rope)
            logits.append(self.borrowed["lm_head"](hidden_BRH))
        return drafts_of_rows(logits)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"modules.{name.removeprefix('chain.')}": value for name, value in self.state_dict().items()}


def build_mtp(target: LlamaForCausalLM, tokens: torch.Tensor, options: TrainingOptions) -> Mtp:
    """Build an untrained chain with the target's sizes, as long as the drafts that it learns."""
    fields = llama_fields(
        target,
        architectures=["LlamaForCausalLMMtp"],
        num_nextn_predict_layers=options.num_drafts,
        num_hidden_layers=1,
        intermediate_size=options.intermediate_size or target.config.intermediate_size,
    )
    return Mtp(LlamaConfig(**fields), target)
