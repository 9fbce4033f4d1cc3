"""DFlash and DSpark in training: layers over blocks [root, mask, mask, ...], which read the target's features.

Context row p is c(p) = hidden_norm(fc(target features of p)); every layer's keys and values of column p are made of it.
Rows of a block see the context before its root, and one another in both directions. Row j drafts token a + j after a
root in column a (DFlash), or token a + j + 1 (DSpark). DSpark adds to the logits a bias by the token before each draft,
and predicts from that token and the row's hidden state whether the draft is accepted.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from specsim.training.attention import Blocks, DrafterAttention, Rope
from specsim.training.drafter import MASK_TOKEN, DrafterModule, Drafts, Roots
from specsim.training.options import TrainingOptions
from specsim.training.target import TargetReading

CONFIDENCE_WEIGHT = 0.1


class BlockLayer(nn.Module):
    """A layer of Qwen3, whose keys and values of the context are given."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn = DrafterAttention(config, config.hidden_size)
        self.mlp = Qwen3MLP(config)

    def forward(
        self, x_BNH: torch.Tensor, context_BCH: torch.Tensor, ropes: tuple[Rope, Rope], blocks: Blocks
    ) -> torch.Tensor:
        context = self.self_attn.heads(context_BCH, ropes[0])
        rows = self.self_attn.heads(self.input_layernorm(x_BNH), ropes[1])
        x_BNH = x_BNH + self.self_attn.attend_blocks(rows, context, blocks)
        return x_BNH + self.mlp(self.post_attention_layernorm(x_BNH))


class MarkovHead(nn.Module):
    """A bias of the logits by the token before."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.3)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """A guess of whether a draft is accepted."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)


class BlockModule(DrafterModule):
    """Such layers; embedding and lm_head are the target's."""

    def __init__(self, config: Qwen3Config, layer_ids: list[int], first_slot: int, target: LlamaForCausalLM) -> None:
        """layer_ids: target layers whose outputs are the features. first_slot: row that makes the first draft."""
        super().__init__()
        self.config = config
        self.feature_layers = [layer + 1 for layer in layer_ids]
        self.first_slot = first_slot
        self.fc = nn.Linear(len(layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        rank = getattr(config, "markov_rank", 0)
        self.markov_head = MarkovHead(config.vocab_size, rank) if rank else None
        self.confidence_head = ConfidenceHead(config.hidden_size + rank) if rank else None
        self.rotary = Qwen3RotaryEmbedding(config)
        self.borrowed = {"embed_tokens": target.model.embed_tokens, "lm_head": target.lm_head}
        self.norm.load_state_dict(target.model.norm.state_dict())

    def drafts(self, reading: TargetReading, tokens_BC: torch.Tensor, roots: Roots, num_drafts: int) -> list[Drafts]:
        num_rows = num_drafts + self.first_slot
        rows = torch.arange(num_rows, device=tokens_BC.device)
        exists_BAS = rows < (roots.num_drafts_BA + self.first_slot)[..., None]
        blocks = Blocks(roots.columns_BA, exists_BAS[..., None, :].expand(-1, -1, num_rows, -1))
        masks_BAS = torch.full(exists_BAS.shape, MASK_TOKEN, device=tokens_BC.device)
        masks_BAS[..., 0] = tokens_BC.gather(1, roots.columns_BA)
        x_BNH = self.borrowed["embed_tokens"](masks_BAS.flatten(1))
        context_BCH = self.hidden_norm(self.fc(reading.features_BCF[:, :-1]))
        columns_1C = torch.arange(tokens_BC.shape[1] - 1, device=tokens_BC.device)[None]
        ropes = self.rotary(context_BCH, columns_1C), self.rotary(x_BNH, blocks.positions)
        for layer in self.layers:
            x_BNH = layer(x_BNH, context_BCH, ropes, blocks)
        hidden_BASH = self.norm(x_BNH).unflatten(1, (-1, num_rows))[:, :, self.first_slot :]
        return [
            self._drafts_of(hidden_BAH, tokens_BC, roots, index)
            for index, hidden_BAH in enumerate(hidden_BASH.unbind(2))
        ]

    def _drafts_of(self, hidden_BAH: torch.Tensor, tokens_BC: torch.Tensor, roots: Roots, index: int) -> Drafts:
        """Read out the drafts of depth index + 1."""
        columns_BA = roots.columns_BA + index
        exists_BA = (roots.num_drafts_BA > index).float()
        logits_BAV = self.borrowed["lm_head"](hidden_BAH)
        if self.markov_head is None or self.confidence_head is None:
            return Drafts(logits_BAV, columns_BA, exists_BA)
        before_BAM = self.markov_head.markov_w1(tokens_BC.gather(1, columns_BA))
        logits_BAV = logits_BAV + self.markov_head.markov_w2(before_BAM)
        confidence_BA = self.confidence_head.proj(torch.cat([hidden_BAH, before_BAM], -1))[..., 0]
        return Drafts(logits_BAV, columns_BA, exists_BA, confidence_BA=confidence_BA)

    def auxiliary_loss(self, drafts: Drafts, prob_BAV: torch.Tensor, reading: TargetReading) -> torch.Tensor:
        """Cross-entropy of whether a draft is the target's first choice, its acceptance at temperature 0."""
        if drafts.confidence_BA is None:
            return super().auxiliary_loss(drafts, prob_BAV, reading)
        is_accepted_BA = (drafts.logits_BAV.argmax(-1) == prob_BAV.argmax(-1)).float()
        missed_BA = F.binary_cross_entropy_with_logits(drafts.confidence_BA.float(), is_accepted_BA, reduction="none")
        return CONFIDENCE_WEIGHT * (missed_BA * drafts.weights_BA).mean()


def build_dflash(target: LlamaForCausalLM, tokens: torch.Tensor, options: TrainingOptions) -> BlockModule:
    """Build an untrained DFlash drafter, with the config.json of z-lab/dflash."""
    layer_ids = _layer_ids(target, options)
    nested = {"target_layer_ids": layer_ids, "mask_token_id": MASK_TOKEN}
    fields = {"architectures": ["DFlashDraftModel"], "block_size": options.num_drafts + 1, "dflash_config": nested}
    return BlockModule(_config(target, options, fields), layer_ids, 1, target)


def build_dspark(target: LlamaForCausalLM, tokens: torch.Tensor, options: TrainingOptions) -> BlockModule:
    """Build an untrained DSpark drafter, with the config.json of deepseek-ai/DeepSpec."""
    layer_ids = _layer_ids(target, options)
    fields = {
        "block_size": options.num_drafts,
        "target_layer_ids": layer_ids,
        "mask_token_id": MASK_TOKEN,
        "num_anchors": options.num_roots,
        "markov_head_type": "vanilla",
        "markov_rank": options.markov_rank,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return BlockModule(_config(target, options, fields), layer_ids, 0, target)


def _layer_ids(target: LlamaForCausalLM, options: TrainingOptions) -> list[int]:
    """Name feature layers by their output."""
    return [layer - 1 for layer in options.feature_layers_of(target.config.num_hidden_layers)]


def _config(target: LlamaForCausalLM, options: TrainingOptions, fields: dict[str, object]) -> Qwen3Config:
    """Build a configuration of Qwen3's layers with the target's sizes."""
    source = target.config
    sizes = {
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": options.intermediate_size or source.intermediate_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": source.num_attention_heads,
        "num_key_value_heads": source.num_key_value_heads,
        "head_dim": source.hidden_size // source.num_attention_heads,
        "max_position_embeddings": source.max_position_embeddings,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_parameters": source.rope_parameters,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "tie_word_embeddings": False,
    }
    return Qwen3Config(**{**sizes, **fields})
