"""Decoder over a block of mask tokens, which reads the target's features, see the reference."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from specsim.core.block import BlockDrafterConfig
from specsim.core.drafter import Placement
from specsim.core.pool import KVBuffer
from specsim.fast.drafters.autoregressive import DecoderHead
from specsim.fast.layers import write_keys_and_values
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.model.rows import HiddenRows, embed
from specsim.fast.targets.decoder import DecoderTarget, run_layer


class BlockHead(DecoderHead):
    """Layers of a block drafter, with the keys and values of a context from the rows of the fused projection."""

    def __init__(
        self, config: BlockDrafterConfig, tensors: Mapping[str, torch.Tensor], target: DecoderTarget, on: Placement
    ) -> None:
        super().__init__(config, tensors, target, on)
        self.block = config.block
        self._causal_layers = config.causal_layers
        self.device = on.device
        embedding = self._weights.get("embed_tokens.weight")
        self._embedding = target.embedding if embedding is None else embedding

    def write_context(self, features_RF: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer) -> None:
        """Write every layer's keys and values of the rows' columns; a row with slot -1 writes nothing."""
        projected_RH = self._weights.project(HiddenRows(features_RF), "fc")
        context = HiddenRows(HiddenRows(projected_RH, self._norm("hidden_norm")).normed())
        forward = self._forward(metadata, kv, self._embedding.dtype)
        for layer in range(self._num_layers):
            weights = self._weights.under(f"layers.{layer}.self_attn")
            write_keys_and_values(context, weights, self._model, layer, forward)

    def forward(
        self, input_ids_R: torch.Tensor, metadata: Mapping[bool, AttentionMetadata], kv: KVBuffer
    ) -> torch.Tensor:
        """Run the rows of blocks, and write their KV: hidden after the final norm, [R, H].

        metadata: by whether a layer is causal; both have the same positions.
        """
        full = self._forward(metadata[False], kv, self._embedding.dtype)
        causal = replace(full, metadata=metadata[True])
        rows = embed(input_ids_R, self._embedding, self._norm("layers.0.input_layernorm"))
        for layer in range(self._num_layers):
            is_last = layer == self._num_layers - 1
            following = self._norm("norm" if is_last else f"layers.{layer + 1}.input_layernorm")
            weights = self._weights.under(f"layers.{layer}")
            forward = causal if layer in self._causal_layers else full
            rows, _ = run_layer(rows, weights, self._model, layer, forward, following)
        return rows.normed()

    def biased(self, logits_RV: torch.Tensor, before_R: torch.Tensor) -> torch.Tensor:
        """Add W2 · W1[token before], given as target ids, where there is a Markov head."""
        if not self.block.markov_rank:
            return logits_RV
        return self._weights.project_residual(
            logits_RV, self._embed_before(before_R), "markov_head.markov_w2", None
        ).values

    def confidence(self, hidden_RH: torch.Tensor, before_R: torch.Tensor) -> torch.Tensor:
        """Predict the logit of each draft's acceptance, f32 [R], from what is known before it is drawn."""
        if self.block.confidence == "hidden_and_token":
            hidden_RH = torch.cat([hidden_RH, self._embed_before(before_R).values], dim=-1)
        return self._weights.project(HiddenRows(hidden_RH), "confidence_head.proj")[:, 0].float()

    def _embed_before(self, before_R: torch.Tensor) -> HiddenRows:
        return embed(before_R, self._weights["markov_head.markov_w1.weight"])
