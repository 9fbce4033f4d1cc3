"""DFlash and DSpark in training: layers over blocks [root, mask, mask, ...], which read the target's features.

Context row p is c(p) = hidden_norm(fc(target features of p)); every layer's keys and values of column p are made of it.
Rows of a block see the context before its root, and one another in both directions. Row j drafts token a + j after a
root in column a (DFlash), or token a + j + 1 (DSpark). DSpark adds to the logits a bias by the token before each draft,
and predicts from that token and the row's hidden state whether the draft is accepted.
"""

import torch
from torch import nn
from transformers import LlamaForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from specsim.maintain.training.block_attention import BlockAttention, Blocks
from specsim.maintain.training.p_eagle import MASK_TOKEN
from specsim.maintain.training.parallel import ParallelLearner, Roots, Slot
from specsim.maintain.training.recipe import Recipe
from specsim.training.heads import Features, Rope


class BlockLayer(nn.Module):
    """A layer of Qwen3, whose keys and values of the context are given."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn = BlockAttention(config, config.hidden_size)
        self.mlp = Qwen3MLP(config)

    def forward(
        self, x_BNH: torch.Tensor, context_BCH: torch.Tensor, ropes: tuple[Rope, Rope], blocks: Blocks
    ) -> torch.Tensor:
        context = self.self_attn.heads(context_BCH, ropes[0])
        own = self.self_attn.heads(self.input_layernorm(x_BNH), ropes[1])
        x_BNH = x_BNH + self.self_attn.attend_blocks(own, context, blocks)
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


class BlockLearner(ParallelLearner):
    """Such layers; embedding and lm_head are the target's."""

    def __init__(self, config: Qwen3Config, layer_ids: list[int], first_slot: int, target: LlamaForCausalLM) -> None:
        """layer_ids: target layers whose outputs are the features. first_slot: row that makes the first draft."""
        super().__init__()
        self.config = config
        self.layer_ids = layer_ids
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

    @property
    def feature_layers(self) -> list[int]:
        return [layer + 1 for layer in self.layer_ids]

    def slots(self, features: Features, tokens_BC: torch.Tensor, roots: Roots, depth: int) -> list[Slot]:
        num_rows = depth + self.first_slot
        rows = torch.arange(num_rows, device=tokens_BC.device)
        exists_BAS = rows < (roots.num_drafts_BA + self.first_slot)[..., None]
        seen_BASS = exists_BAS[..., None, :].expand(-1, -1, num_rows, -1)
        blocks = Blocks(roots.columns_BA, seen_BASS)
        masks_BAS = torch.full(exists_BAS.shape, MASK_TOKEN, device=tokens_BC.device)
        masks_BAS[..., 0] = tokens_BC.gather(1, roots.columns_BA)
        x_BNH = self.borrowed["embed_tokens"](masks_BAS.flatten(1))
        context_BCH = self.hidden_norm(self.fc(features.aux_BCF[:, :-1]))
        columns_1C = torch.arange(tokens_BC.shape[1] - 1, device=tokens_BC.device)[None]
        ropes = self.rotary(context_BCH, columns_1C), self.rotary(x_BNH, blocks.positions)
        for layer in self.layers:
            x_BNH = layer(x_BNH, context_BCH, ropes, blocks)
        hidden_BASH = self.norm(x_BNH).unflatten(1, (-1, num_rows))[:, :, self.first_slot :]
        return [
            self._slot(hidden_BAH, tokens_BC, roots, index) for index, hidden_BAH in enumerate(hidden_BASH.unbind(2))
        ]

    def _slot(self, hidden_BAH: torch.Tensor, tokens_BC: torch.Tensor, roots: Roots, index: int) -> Slot:
        """Read out the drafts of depth index + 1."""
        columns_BA = roots.columns_BA + index
        exists_BA = roots.num_drafts_BA > index
        logits_BAV = self.borrowed["lm_head"](hidden_BAH)
        if self.markov_head is None or self.confidence_head is None:
            return Slot(logits_BAV, columns_BA, exists_BA)
        before_BAM = self.markov_head.markov_w1(tokens_BC.gather(1, columns_BA))
        logits_BAV = logits_BAV + self.markov_head.markov_w2(before_BAM)
        confidence_BA = self.confidence_head.proj(torch.cat([hidden_BAH, before_BAM], -1))[..., 0]
        return Slot(logits_BAV, columns_BA, exists_BA, confidence_BA)


def build_dflash(target: LlamaForCausalLM, recipe: Recipe) -> BlockLearner:
    """Build an untrained DFlash drafter, with the config.json of z-lab/dflash."""
    nested = {"target_layer_ids": _layer_ids(recipe), "mask_token_id": MASK_TOKEN}
    own = {"architectures": ["DFlashDraftModel"], "block_size": recipe.parallel_drafts + 1, "dflash_config": nested}
    return BlockLearner(_config(target, recipe, own), _layer_ids(recipe), 1, target)


def build_dspark(target: LlamaForCausalLM, recipe: Recipe) -> BlockLearner:
    """Build an untrained DSpark drafter, with the config.json of deepseek-ai/DeepSpec."""
    own = {
        "block_size": recipe.parallel_drafts,
        "target_layer_ids": _layer_ids(recipe),
        "mask_token_id": MASK_TOKEN,
        "num_anchors": recipe.parallel_roots,
        "markov_head_type": "vanilla",
        "markov_rank": recipe.markov_rank,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return BlockLearner(_config(target, recipe, own), _layer_ids(recipe), 0, target)


def _layer_ids(recipe: Recipe) -> list[int]:
    """Name feature layers by their output."""
    return [layer - 1 for layer in recipe.feature_layers]


def _config(target: LlamaForCausalLM, recipe: Recipe, own: dict[str, object]) -> Qwen3Config:
    """Build a configuration of Qwen3's layers with the target's sizes."""
    of_target = target.config
    sizes = {
        "vocab_size": of_target.vocab_size,
        "hidden_size": of_target.hidden_size,
        "intermediate_size": recipe.block_intermediate_size,
        "num_hidden_layers": recipe.block_layers,
        "num_attention_heads": of_target.num_attention_heads,
        "num_key_value_heads": of_target.num_key_value_heads,
        "head_dim": of_target.hidden_size // of_target.num_attention_heads,
        "max_position_embeddings": of_target.max_position_embeddings,
        "rms_norm_eps": of_target.rms_norm_eps,
        "rope_parameters": of_target.rope_parameters,
        "bos_token_id": of_target.bos_token_id,
        "eos_token_id": of_target.eos_token_id,
        "tie_word_embeddings": False,
    }
    return Qwen3Config(**{**sizes, **own})
