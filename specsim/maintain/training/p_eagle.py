"""P-EAGLE in training: an EAGLE-3 head of some layers, whose mask rows draft depths 2, 3, ... of a root.

Row p < C - 1 reads token p + 1 and the target's features of position p, and drafts token p + 2. A root in column a has
mask rows at positions a, a + 1, ...: the row of depth d ≥ 2 at a + d - 2. Each sees rows p < a, the mask rows before it
and itself. The deeper, the fewer: as in conditional drop-token sampling (arXiv 2602.01469).
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from specsim.maintain.training.block_attention import BlockAttention, Blocks
from specsim.maintain.training.parallel import ParallelLearner, Roots, Slot
from specsim.maintain.training.recipe import Recipe
from specsim.training.heads import Features, Rope

MASK_TOKEN = 0  # end of text, which no draft follows
Pair = tuple[torch.Tensor, ...]  # rows of the context [B, C, ...] and of blocks [B, N, ...]


class PEagleLayer(nn.Module):
    """A Llama layer over both kinds of rows; the first one has norms for embedding and hidden state."""

    def __init__(self, config: LlamaConfig, is_first: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(2)
        )
        if is_first:
            self.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config, 2 * size if is_first else size)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Pair, embedding: Pair | None, ropes: tuple[Rope, Rope], blocks: Blocks) -> Pair:
        """Run a layer; the first one reads embeddings too."""
        if embedding is None:
            normed = [self.input_layernorm(each) for each in hidden]
        else:
            parts = zip(embedding, hidden, strict=True)
            normed = [torch.cat([self.input_layernorm(own), self.hidden_norm(each)], -1) for own, each in parts]
        context, own = (self.self_attn.heads(*each) for each in zip(normed, ropes, strict=True))
        context_BCH = hidden[0] + self.self_attn.attend_context(context)
        mask_BNH = hidden[1] + self.self_attn.attend_blocks(own, context, blocks)
        return tuple(each + self.mlp(self.post_attention_layernorm(each)) for each in (context_BCH, mask_BNH))


class PEagle(ParallelLearner):
    """Such a head; embedding and lm_head are the target's."""

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.config = config
        features = len(config.eagle_aux_hidden_state_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.mask_hidden = nn.Parameter(torch.randn(features))
        self.layers = nn.ModuleList(PEagleLayer(config, index == 0) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)
        self.borrowed = {"embed_tokens": target.model.embed_tokens, "lm_head": target.lm_head}
        self.norm.load_state_dict(target.model.norm.state_dict())

    @property
    def feature_layers(self) -> list[int]:
        return self.config.eagle_aux_hidden_state_layer_ids

    def slots(self, features: Features, tokens_BC: torch.Tensor, roots: Roots, depth: int) -> list[Slot]:
        """Draft; the slot of depth 1 has a draft for every row, with a root or without."""
        num_windows, num_columns = tokens_BC.shape
        seen_BASS = torch.ones(depth - 1, depth - 1, dtype=torch.bool, device=tokens_BC.device).tril()
        blocks = Blocks(roots.columns_BA, seen_BASS.expand(*roots.columns_BA.shape, -1, -1))
        masks_BN = torch.full_like(blocks.positions, MASK_TOKEN)
        embed = self.borrowed["embed_tokens"]
        embedding = embed(tokens_BC[:, 1:]), embed(masks_BN)
        mask_H = self.fc(self.mask_hidden)
        hidden = self.fc(features.aux_BCF[:, :-1]), mask_H.expand(*masks_BN.shape, -1)
        row_1C = torch.arange(num_columns - 1, device=tokens_BC.device)[None]
        ropes = self.rotary(embedding[0], row_1C), self.rotary(embedding[1], blocks.positions)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, embedding if index == 0 else None, ropes, blocks)
        context_BCV, masks_BNV = (self.borrowed["lm_head"](self.norm(each)) for each in hidden)
        columns_BC = row_1C.expand(num_windows, -1) + 1
        slots = [Slot(context_BCV, columns_BC, torch.ones_like(columns_BC, dtype=torch.bool))]
        for mask, logits_BAV in enumerate(masks_BNV.unflatten(1, (-1, depth - 1)).unbind(2)):
            slots.append(Slot(logits_BAV, roots.columns_BA + mask + 1, roots.num_drafts_BA >= mask + 2))
        return slots


def build_p_eagle(target: LlamaForCausalLM, recipe: Recipe) -> PEagle:
    """Build an untrained head, whose draft vocabulary is the target's."""
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "parallel_drafting": True,
        "mask_token_id": MASK_TOKEN,
        "draft_vocab_size": target.config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(recipe.feature_layers),
        "eagle_aux_hidden_state_convention": "entering",
        "norm_before_residual": False,
        "num_hidden_layers": recipe.p_eagle_layers,
        "intermediate_size": recipe.p_eagle_intermediate_size,
        "tie_word_embeddings": False,
    }
    return PEagle(LlamaConfig(**{**target.config.to_dict(), **own}), target)
