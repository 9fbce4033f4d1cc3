"""Pre-norm decoders of any family, with each residual sum fused with the next norm."""

from collections.abc import Mapping

import torch

from specsim.core.pool import KVBuffer
from specsim.core.rank_group import RankGroup
from specsim.core.target import Experts, ForwardOutput, LatentAttention, ModelConfig
from specsim.fast.layers import Weights, gated_mlp_residual, self_attention_residual
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.model.rank_sums import sum_residual
from specsim.fast.model.rotary import ForwardContext, inverse_frequencies, rotations
from specsim.fast.model.rows import HiddenRows, Norm, embed, rms_norm
from specsim.fast.persistent.forward import PersistentForward
from specsim.fast.runtime.peer_memory import join_slices, without_padding
from specsim.fast.targets.experts import mixture_residual
from specsim.fast.targets.latent_attention import latent_attention_residual


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Move and convert weights; routers stay in float32."""
    return {name: tensor.to(device, torch.float32 if ".router." in name else dtype) for name, tensor in tensors.items()}


def attention_residual(
    base: torch.Tensor,
    rows: HiddenRows,
    weights: Weights,
    config: ModelConfig,
    layer: int,
    forward: ForwardContext,
    norm: Norm,
) -> HiddenRows:
    """Compute base + attention of rows, with heads or a latent vector, [R, H], write KV, and prepare the next norm."""
    shape = config.layers[layer].attention
    if isinstance(shape, LatentAttention):
        return latent_attention_residual(base, rows, weights, shape, layer, forward, norm)
    return self_attention_residual(base, rows, weights, config, layer, forward, norm)


def run_layer(
    rows: HiddenRows,
    weights: Weights,
    config: ModelConfig,
    layer: int,
    forward: ForwardContext,
    following: Norm | None,
    out: torch.Tensor | None = None,
) -> tuple[HiddenRows, torch.Tensor | None]:
    """Run a layer and write its KV; returns (rows, experts).

    rows [R, H] are under the following norm, if there is one. experts i16 [R, k] are those of each row, or None.
    out: the output's memory, which may be a slice of a wider tensor.
    """
    layer_config = config.layers[layer]
    between = Norm(weights["post_attention_layernorm.weight"], config.rms_norm_eps)
    rows = attention_residual(rows.values, rows, weights.under("self_attn"), config, layer, forward, between)
    if isinstance(layer_config.mlp, Experts):
        return mixture_residual(rows, weights.under("mlp"), layer_config.mlp, following, out)
    return gated_mlp_residual(rows, weights.under("mlp"), following, out), None


class DecoderTarget:
    """A target of protocol specsim.core.target.Target, from the tensors of models/checkpoint/layout.py.

    ranks: share the weights; config is of the whole model, tensors are this rank's slices.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        ranks: RankGroup | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        if ranks is not None:
            self.config = ranks.part.config(config)
            head = ranks.part.padded(tensors["lm_head.weight"], config.vocab_size)
            tensors = {**tensors, "lm_head.weight": head}
        self._weights = Weights(on_device(tensors, device, dtype), batch_invariant=batch_invariant, ranks=ranks)
        self.embedding = self._weights["model.embed_tokens.weight"]
        self._inverse_D = inverse_frequencies(config.rope).to(device)
        self._amplitude = config.rope.amplitude
        self.persistent: PersistentForward | None = None

    def make_persistent(self, where_it_fits: bool) -> None:
        """Run forwards over trees as one kernel from now on, all of them or the faster ones."""
        tensors = dict(self._weights.tensors)
        batch_invariant = self._weights.batch_invariant
        self.persistent = PersistentForward(self.config, tensors, where_it_fits, batch_invariant)
        self._weights = Weights(tensors, batch_invariant=batch_invariant, ranks=self.ranks)

    def check(self) -> None:
        """Raise RuntimeError where a persistent forward has failed, as far as the host can know without waiting."""
        if self.persistent is not None:
            self.persistent.check()

    def forward(
        self, input_ids_R: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer, feature_layers: tuple[int, ...]
    ) -> ForwardOutput:
        """Run rows through the model and write their KV."""
        if self.persistent is not None and self.persistent.takes(metadata, kv):
            return self._forward_persistent(self.persistent, input_ids_R, metadata, kv, feature_layers)
        size = self.config.hidden_size
        num_rows = len(input_ids_R)
        features_RF = self.embedding.new_empty(num_rows, len(feature_layers) * size)
        # The input of a layer is written directly to the features, where it is one.
        entering = {layer: features_RF[:, i * size : (i + 1) * size] for i, layer in enumerate(feature_layers)}
        forward = ForwardContext(self._cos_sin(metadata), metadata, kv)
        rows = self.embed(input_ids_R, self._input_norm(0), out=entering.get(0))
        routed = []
        for layer in range(len(self.config.layers)):
            weights = self._weights.under(f"model.layers.{layer}")
            following, out = self._input_norm(layer + 1), entering.get(layer + 1)
            rows, chosen_RK = run_layer(rows, weights, self.config, layer, forward, following, out)
            routed += [] if chosen_RK is None else [chosen_RK]
        normed_RH = rows.normed()
        side = {"experts": torch.stack(routed, dim=1)} if routed else {}
        return ForwardOutput(normed_RH, features_RF if feature_layers else normed_RH, side)

    def _cos_sin(self, metadata: AttentionMetadata) -> torch.Tensor:
        return rotations(metadata.positions, self._inverse_D, self.embedding.dtype, self._amplitude)

    def _forward_persistent(
        self,
        persistent: PersistentForward,
        input_ids_R: torch.Tensor,
        metadata: AttentionMetadata,
        kv: KVBuffer,
        feature_layers: tuple[int, ...],
    ) -> ForwardOutput:
        rows_RH, features_RF = persistent(input_ids_R, self._cos_sin(metadata), metadata, kv, feature_layers)
        normed_RH = rms_norm(rows_RH, *self._input_norm(self.config.num_layers))
        return ForwardOutput(normed_RH, features_RF if feature_layers else normed_RH)

    def embed(self, ids_R: torch.Tensor, norm: Norm | None = None, out: torch.Tensor | None = None) -> HiddenRows:
        """Look up embeddings, [R, H], where ranks share the table too, and prepare the next norm."""
        if self.ranks is None:
            return embed(ids_R, self.embedding, norm, out)
        first = self.ranks.part.tokens(self.config.vocab_size).start
        own_RH = embed(ids_R, self.embedding, first_token=first).values  # zeros for tokens of other ranks
        return sum_residual(self.ranks, None, own_RH, norm, out)

    def normed_embedding(self, ids_R: torch.Tensor, norm: Norm, out: torch.Tensor) -> None:
        """Write embeddings under a norm, for drafters that have none of their own."""
        if self.ranks is None:
            rms_norm(self.embedding, *norm, out=out, ids_R=ids_R)
        else:
            rms_norm(self.embed(ids_R).values, *norm, out=out)

    def _input_norm(self, layer: int) -> Norm:
        """Return the first norm of a layer, or the final norm after the last layer."""
        is_layer = layer < len(self.config.layers)
        name = f"model.layers.{layer}.input_layernorm" if is_layer else "model.norm"
        return Norm(self._weights[f"{name}.weight"], self.config.rms_norm_eps)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        logits_RV = self.rank_logits(hidden_RH)
        return logits_RV if self.ranks is None else join_slices(self.ranks, logits_RV, self.config.vocab_size)

    def rank_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute logits of the tokens of this rank's slice, -inf beyond them, or of all without ranks."""
        logits_RC = self._weights.project(HiddenRows(hidden_RH), "lm_head")
        return logits_RC if self.ranks is None else without_padding(self.ranks, logits_RC, self.config.vocab_size)
