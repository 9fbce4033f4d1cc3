"""DFlash (arXiv 2602.06036) and DSpark: a decoder over a block of mask tokens, which reads the target's features.

Context row p is c(p) = hidden_norm(fc(target features of p)); every layer's keys and values of column p are made of
c(p), without the layer's input norm. A block's rows see the context, and in each layer either the whole block or the
rows up to their own (JetSpec, arXiv 2606.18394, and layers with a causal window).
"""

from collections.abc import Mapping

import torch

from specsim.core.block import BlockDrafterConfig
from specsim.core.pool import KVBuffer
from specsim.core.target import HeadAttention, Target
from specsim.reference.attention import AttentionMetadata
from specsim.reference.drafters.autoregressive import DecoderHead
from specsim.reference.layers import rms_norm, rotate
from specsim.reference.targets.decoder import decoder_layer


class BlockHead(DecoderHead):
    """Layers of a block drafter; its draft logits do not depend on the drafts before."""

    def __init__(
        self, config: BlockDrafterConfig, tensors: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype
    ) -> None:
        super().__init__(config, tensors, target, dtype)
        self.block = config.block
        self._causal_layers = config.causal_layers

    def write_context(self, features_RF: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer) -> None:
        """Write every layer's keys and values of the rows' columns; a row with slot -1 writes nothing."""
        eps = self._model.rms_norm_eps
        context_RH = self._norm(self._weights.project(features_RF, "fc"), "hidden_norm")
        for layer, config in enumerate(self._model.layers):
            attention = config.attention
            assert isinstance(attention, HeadAttention)
            weights = self._weights.under(f"layers.{layer}.self_attn")
            key, value = (
                weights.project(context_RH, f"{part}_proj").unflatten(-1, (-1, attention.head_dim)) for part in "kv"
            )
            if attention.has_head_norms:
                key = rms_norm(key, weights["k_norm.weight"], eps)
            kv.write(layer, metadata.slots, rotate(key, metadata.positions, self._inverse_D, attention.rope), value)

    def forward(
        self, input_ids_R: torch.Tensor, metadata: Mapping[bool, AttentionMetadata], kv: KVBuffer
    ) -> torch.Tensor:
        """Run the rows of blocks, and write their KV: hidden after the final norm, [R, H].

        metadata: by whether a layer is causal.
        """
        hidden_RH = self._embedding[input_ids_R]
        for layer in range(self._model.num_layers):
            weights = self._weights.under(f"layers.{layer}")
            seen = metadata[layer in self._causal_layers]
            hidden_RH, _ = decoder_layer(hidden_RH, weights, self._model, self._inverse_D, layer, kv, seen)
        return self._norm(hidden_RH, "norm")

    def biased(self, logits_RV: torch.Tensor, before_R: torch.Tensor) -> torch.Tensor:
        """Add W2 · W1[token before], given as target ids, where there is a Markov head (DSpark).

        A draft's distribution is then conditional on the one before it.
        """
        if not self.block.markov_rank:
            return logits_RV
        return logits_RV + self._weights.project(self._embed_before(before_R), "markov_head.markov_w2")

    def confidence(self, hidden_RH: torch.Tensor, before_R: torch.Tensor) -> torch.Tensor:
        """Predict the logit of each draft's acceptance, f32 [R], from what is known before it is drawn."""
        if self.block.confidence == "hidden_and_token":
            hidden_RH = torch.cat([hidden_RH, self._embed_before(before_R)], dim=-1)
        return self._weights.project(hidden_RH, "confidence_head.proj")[:, 0].float()

    def _embed_before(self, before_R: torch.Tensor) -> torch.Tensor:
        return self._weights["markov_head.markov_w1.weight"][before_R]
