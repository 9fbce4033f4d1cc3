"""DFlash (arXiv 2602.06036) and DSpark: a decoder over a block of mask tokens, which reads the target's features.

Context row p is c(p) = hidden_norm(fc(target features of p)); every layer's keys and values of column p are made of
c(p), without the layer's input norm. A block's rows see the context and each other, in both directions.
"""

from collections.abc import Mapping

import torch

from specsim.core.block import BlockDrafterConfig
from specsim.core.pool import KVBuffer
from specsim.core.target import HeadAttention, Target
from specsim.reference.attention import AttentionMetadata
from specsim.reference.layers import Weights, inverse_frequencies, rms_norm, rotate
from specsim.reference.targets.decoder import decoder_layer


class BlockHead:
    """Layers of a block drafter, for a target of protocol specsim.core.target.Target."""

    def __init__(
        self, config: BlockDrafterConfig, tensors: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype
    ) -> None:
        self.block = config.block
        self._model = config.model
        self._target = target
        floating = {name: tensor.to(dtype) for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._weights = Weights(floating)
        self.d2t = tensors.get("d2t")
        own = self._weights.get("embed_tokens.weight")
        self._embedding = target.embedding if own is None else own
        self._inverse_D = inverse_frequencies(config.model.rope)
        self.kv_layout = config.model.kv_layout
        self.feature_layers = config.feature_layers
        self.draft_vocab_size = config.draft_vocab_size

    def write_context(self, features_RF: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer) -> None:
        """Write every layer's keys and values of the rows' columns; a row with slot -1 writes nothing."""
        eps = self._model.rms_norm_eps
        context_RH = rms_norm(self._weights.project(features_RF, "fc"), self._weights["hidden_norm.weight"], eps)
        for layer, config in enumerate(self._model.layers):
            own = config.attention
            assert isinstance(own, HeadAttention)
            weights = self._weights.under(f"layers.{layer}.self_attn")
            key, value = (
                weights.project(context_RH, f"{part}_proj").unflatten(-1, (-1, own.head_dim)) for part in "kv"
            )
            if own.has_head_norms:
                key = rms_norm(key, weights["k_norm.weight"], eps)
            kv.write(layer, metadata.slots, rotate(key, metadata.positions, self._inverse_D, own.rope), value)

    def forward(self, input_ids_R: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer) -> torch.Tensor:
        """Run the rows of blocks, and write their KV: hidden after the final norm, [R, H]."""
        hidden_RH = self._embedding[input_ids_R]
        for layer in range(self._model.num_layers):
            weights = self._weights.under(f"layers.{layer}")
            hidden_RH, _ = decoder_layer(hidden_RH, weights, self._model, self._inverse_D, layer, kv, metadata)
        return rms_norm(hidden_RH, self._weights["norm.weight"], self._model.rms_norm_eps)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute draft logits, [R, draft vocabulary], which do not depend on the drafts before."""
        has_head = self._weights.get("lm_head.weight") is not None
        return self._weights.project(hidden_RH, "lm_head") if has_head else self._target.logits(hidden_RH)

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
