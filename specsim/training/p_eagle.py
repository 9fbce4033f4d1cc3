"""P-EAGLE in training: an EAGLE-3 head of some layers, whose mask rows draft depths 2, 3, ... of a root.

Row p < C - 1 reads token p + 1 and the target's features of position p, and drafts token p + 2. A root in column a has
mask rows at positions a, a + 1, ...: the row of depth d ≥ 2 at a + d - 2. Each sees rows p < a, the mask rows before it
and itself. The deeper, the fewer: as in conditional drop-token sampling (arXiv 2602.01469).
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from specsim.training.attention import Blocks, DrafterAttention, Rope
from specsim.training.drafter import MASK_TOKEN, DrafterModule, Drafts, Roots, llama_fields
from specsim.training.options import TrainingOptions
from specsim.training.target import TargetReading

BothRows = tuple[torch.Tensor, ...]  # rows of the context [B, C, ...] and of blocks [B, N, ...]


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
        self.self_attn = DrafterAttention(config, 2 * size if is_first else size)
        self.mlp = LlamaMLP(config)

    def forward(
        self, hidden: BothRows, embedding: BothRows | None, ropes: tuple[Rope, Rope], blocks: Blocks
    ) -> BothRows:
        """Run a layer; the first one reads embeddings too."""
        if embedding is None:
            normed = [self.input_layernorm(rows) for rows in hidden]
        else:
            pairs = zip(embedding, hidden, strict=True)
            normed = [torch.cat([self.input_layernorm(tokens), self.hidden_norm(rows)], -1) for tokens, rows in pairs]
        context, masks = (self.self_attn.heads(rows, rope) for rows, rope in zip(normed, ropes, strict=True))
        context_BCH = hidden[0] + self.self_attn.attend_causally(context)
        mask_BNH = hidden[1] + self.self_attn.attend_blocks(masks, context, blocks)
        return tuple(rows + self.mlp(self.post_attention_layernorm(rows)) for rows in (context_BCH, mask_BNH))


class PEagle(DrafterModule):
    """Such a head; embedding and lm_head are the target's."""

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.config = config
        self.feature_layers = config.eagle_aux_hidden_state_layer_ids
        num_features = len(self.feature_layers) * config.hidden_size
        self.fc = nn.Linear(num_features, config.hidden_size, bias=False)
        self.mask_hidden = nn.Parameter(torch.randn(num_features))
        self.layers = nn.ModuleList(PEagleLayer(config, index == 0) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)
        self.borrowed = {"embed_tokens": target.model.embed_tokens, "lm_head": target.lm_head}
        self.norm.load_state_dict(target.model.norm.state_dict())

    def drafts(self, reading: TargetReading, tokens_BC: torch.Tensor, roots: Roots, num_drafts: int) -> list[Drafts]:
        """Draft; depth 1 has a draft for every row, with a root or without."""
        num_windows, num_columns = tokens_BC.shape
        num_masks = num_drafts - 1
        seen_BASS = torch.ones(num_masks, num_masks, dtype=torch.bool, device=tokens_BC.device).tril()
        blocks = Blocks(roots.columns_BA, seen_BASS.expand(*roots.columns_BA.shape, -1, -1))
        masks_BN = torch.full_like(blocks.positions, MASK_TOKEN)
        embed = self.borrowed["embed_tokens"]
        embedding = embed(tokens_BC[:, 1:]), embed(masks_BN)
        hidden = self.fc(reading.features_BCF[:, :-1]), self.fc(self.mask_hidden).expand(*masks_BN.shape, -1)
        row_1C = torch.arange(num_columns - 1, device=tokens_BC.device)[None]
        ropes = self.rotary(embedding[0], row_1C), self.rotary(embedding[1], blocks.positions)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, embedding if index == 0 else None, ropes, blocks)
        context_BCV, masks_BNV = (self.borrowed["lm_head"](self.norm(rows)) for rows in hidden)
        columns_BC = row_1C.expand(num_windows, -1) + 1
        drafts = [Drafts(context_BCV, columns_BC, torch.ones_like(columns_BC, dtype=torch.float32))]
        for mask, logits_BAV in enumerate(masks_BNV.unflatten(1, (-1, num_masks)).unbind(2) if num_masks else ()):
            exists_BA = (roots.num_drafts_BA >= mask + 2).float()
            drafts.append(Drafts(logits_BAV, roots.columns_BA + mask + 1, exists_BA))
        return drafts


def build_p_eagle(target: LlamaForCausalLM, tokens: torch.Tensor, options: TrainingOptions) -> PEagle:
    """Build an untrained head, whose draft vocabulary is the target's."""
    fields = llama_fields(
        target,
        architectures=["LlamaForCausalLMEagle3"],
        parallel_drafting=True,
        mask_token_id=MASK_TOKEN,
        draft_vocab_size=target.config.vocab_size,
        eagle_aux_hidden_state_layer_ids=list(options.feature_layers_of(target.config.num_hidden_layers)),
        eagle_aux_hidden_state_convention="entering",
        norm_before_residual=False,
        num_hidden_layers=options.num_layers,
        intermediate_size=options.intermediate_size or target.config.intermediate_size,
    )
    return PEagle(LlamaConfig(**fields), target)
