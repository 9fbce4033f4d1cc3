"""Parts of a decoder layer, built on products that fuse the steps between them."""

from collections.abc import Mapping

import torch

from specsim.core.errors import InputError
from specsim.core.rank_group import RankGroup
from specsim.core.target import HeadAttention, ModelConfig
from specsim.fast.attention import Scores, attention
from specsim.fast.model.linear import linear, linear_gated, linear_residual, streaming
from specsim.fast.model.qkv_product import project_rotate_and_write
from specsim.fast.model.rank_sums import sum_residual
from specsim.fast.model.rotary import ForwardContext, HeadNorms, rotate_and_write
from specsim.fast.model.rows import HiddenRows, Norm

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def _fused(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack projections of the same input into one, and make every tensor contiguous for the kernels."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    for name in list(tensors):
        for fused_name, parts in FUSED.items():
            prefix, match, kind = name.rpartition(f"{parts[0]}.")
            has_all = all(f"{prefix}{part}.{kind}" in tensors for part in parts)
            if match and prefix[-1:] in ("", ".") and has_all:
                tensors[f"{prefix}{fused_name}.{kind}"] = _stacked(
                    [tensors.pop(f"{prefix}{part}.{kind}") for part in parts]
                )
    return tensors


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """Stack contiguous rows of all parts, without a copy where they are adjacent in one storage."""
    first = parts[0]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    is_whole = [part.data_ptr() for part in parts[1:]] == ends[:-1]
    if not is_whole or len({part.untyped_storage().data_ptr() for part in parts}) > 1:
        return torch.cat(parts)
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


class Weights:
    """Tensors whose names share a prefix.

    `qkv_proj` and `gate_up_proj` are fused projections.

    batch_invariant: whether a product's rows must not depend on their number. ranks: hold a slice of the tensors each
    (specsim.core.rank_part), so that products onto base rows are summed over them.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        prefix: str = "",
        batch_invariant: bool = False,
        ranks: RankGroup | None = None,
    ) -> None:
        # Below a prefix they are already fused.
        self._tensors = tensors if prefix else _fused(tensors)
        self._prefix = prefix
        self.batch_invariant = batch_invariant
        self.ranks = ranks

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._prefix + name]

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All tensors by their whole names."""
        return self._tensors

    def get(self, name: str) -> torch.Tensor | None:
        """Find a tensor by name, None if there is none."""
        return self._tensors.get(self._prefix + name)

    def under(self, prefix: str) -> "Weights":
        """Extend the prefix."""
        return Weights(self._tensors, f"{self._prefix}{prefix}.", self.batch_invariant, self.ranks)

    def project(self, x: HiddenRows, name: str) -> torch.Tensor:
        """Compute x Wᵀ (+ bias), [R, out]."""
        return linear(x, *self._named(name), self.batch_invariant)

    def project_residual(
        self, base: torch.Tensor, rows: HiddenRows, name: str, norm: Norm | None, out: torch.Tensor | None = None
    ) -> HiddenRows:
        """Compute base + x Wᵀ (+ bias), [R, out], and prepare the next norm."""
        if self.ranks is not None:
            return sum_residual(self.ranks, base, self.project(rows, name), norm, out)
        return linear_residual(base, rows, *self._named(name), self.batch_invariant, norm, out)

    def project_gated(self, rows: HiddenRows, name: str) -> torch.Tensor:
        """Compute silu(gate) · up, [R, out / 2], with a weight that stacks gate and up."""
        return linear_gated(rows, *self._named(name), self.batch_invariant)

    def _named(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self[f"{name}.weight"], self.get(f"{name}.bias")


def heads_of(config: ModelConfig, layer: int) -> HeadAttention:
    """Return a layer's attention, or raise InputError where the kernels have none like it."""
    heads = config.layers[layer].attention
    if not isinstance(heads, HeadAttention):
        raise InputError("attention", type(heads).__name__, "keys and values of heads in this layer")
    if heads.rope.size != heads.head_dim or heads.rope.interleaved:
        allowed = "rotary pairs (i, i + D/2) of all channels; the reference rotates others too"
        raise InputError("rope", f"{heads.rope.size} of {heads.head_dim} channels", allowed)
    return heads


def _queries(
    rows: HiddenRows, weights: Weights, config: ModelConfig, layer: int, forward: ForwardContext
) -> torch.Tensor:
    """Compute rotated queries [R, A, D], and write keys and values in the same launches."""
    heads = heads_of(config, layer)
    q_norm = weights.get("q_norm.weight")
    k_norm = weights.get("k_norm.weight")
    norms = None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm)
    weight = weights["qkv_proj.weight"]
    tiling, ready = streaming(rows, weight, weights.batch_invariant)
    if tiling and norms is None and tiling.fits_heads(heads.head_dim):
        bias = weights.get("qkv_proj.bias")
        return project_rotate_and_write(tiling, ready, weight, bias, forward, layer, heads.num_heads)
    qkv_R = weights.project(ready, "qkv_proj")
    return rotate_and_write(qkv_R, norms, config.rms_norm_eps, forward, layer, heads.num_heads)


def write_keys_and_values(
    rows: HiddenRows, weights: Weights, config: ModelConfig, layer: int, forward: ForwardContext
) -> None:
    """Write the keys and values of rows that have no queries, from their part of the fused projection."""
    heads = heads_of(config, layer)
    first = heads.num_heads * heads.head_dim
    bias = weights.get("qkv_proj.bias")
    k_norm = weights.get("k_norm.weight")
    norms = None if k_norm is None else HeadNorms(k_norm, k_norm)
    kv_R = linear(
        rows, weights["qkv_proj.weight"][first:], None if bias is None else bias[first:], weights.batch_invariant
    )
    rotate_and_write(kv_R, norms, config.rms_norm_eps, forward, layer, num_heads=0)


def self_attention_residual(
    base: torch.Tensor,
    rows: HiddenRows,
    weights: Weights,
    config: ModelConfig,
    layer: int,
    forward: ForwardContext,
    norm: Norm | None = None,
) -> HiddenRows:
    """Compute base + attention of rows, [R, H], write their KV, and prepare the next norm."""
    heads = heads_of(config, layer)
    query_RAD = _queries(rows, weights, config, layer, forward)
    scores = Scores(heads.window, weights.get("sinks"), first_columns=heads.first_columns)
    attended_RAD = attention(query_RAD, layer, forward.kv, forward.metadata, scores, invariant=weights.batch_invariant)
    return weights.project_residual(base, HiddenRows(attended_RAD.flatten(1)), "o_proj", norm)


def query_attention_residual(
    base: torch.Tensor,
    rows: HiddenRows,
    weights: Weights,
    config: ModelConfig,
    layer: int,
    source: int,
    forward: ForwardContext,
    norm: Norm | None = None,
) -> HiddenRows:
    """Compute base + attention of rows to the KV of layer `source`, [R, H], and prepare the next norm.

    The layer has queries only, and writes nothing.
    """
    q_norm = weights.get("q_norm.weight")
    norms = None if q_norm is None else HeadNorms(q_norm, q_norm)
    query_R = weights.project(rows, "q_proj")
    heads = heads_of(config, layer)
    eps = config.rms_norm_eps
    query_RAD = rotate_and_write(query_R, norms, eps, forward, source, heads.num_heads, writes_kv=False)
    scores = Scores(heads.window, weights.get("sinks"))
    attended_RAD = attention(query_RAD, source, forward.kv, forward.metadata, scores, invariant=weights.batch_invariant)
    return weights.project_residual(base, HiddenRows(attended_RAD.flatten(1)), "o_proj", norm)


def gated_mlp_residual(
    rows: HiddenRows, weights: Weights, norm: Norm | None = None, out: torch.Tensor | None = None
) -> HiddenRows:
    """Compute x + down(silu(gate n) · up n), [R, H], and prepare the next norm.

    x are the rows, n the rows after their norm. out: the output's memory, which may be a slice of a wider tensor.
    """
    grown = HiddenRows(weights.project_gated(rows, "gate_up_proj"))
    return weights.project_residual(rows.values, grown, "down_proj", norm, out)
