"""The parts of a decoder layer, over products that fuse what lies between two of them."""

from collections.abc import Mapping

import torch

from specsim.core.pool import KVBuffer
from specsim.core.target import ModelConfig
from specsim.fast.attention import attention
from specsim.fast.model.linear import linear, linear_gated, linear_onto, streaming
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.model.rotary import project_rotate_and_write, rotate_and_write
from specsim.fast.model.rows import Norm, Rows

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _fused(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, contiguous as kernels read them, with projections of the same input stacked into one."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    for name in list(tensors):
        for whole, parts in FUSED.items():
            prefix, found, kind = name.rpartition(f"{parts[0]}.")
            if found and prefix[-1:] in ("", "."):
                tensors[f"{prefix}{whole}.{kind}"] = _stacked([tensors.pop(f"{prefix}{part}.{kind}") for part in parts])
    return tensors


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows of all parts, contiguous ones; not copied where they lie one behind the other in one storage already."""
    first, ends = parts[0], [part.data_ptr() + part.nbytes for part in parts]
    is_whole = [part.data_ptr() for part in parts[1:]] == ends[:-1]
    if not is_whole or len({part.untyped_storage().data_ptr() for part in parts}) > 1:
        return torch.cat(parts)
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


class Weights:
    """Tensors by name, seen from below a prefix; `qkv_proj` and `gate_up_proj` stand for the projections they fuse.

    batch_invariant: whether a product's rows may not depend on how many there are.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str = "", batch_invariant: bool = False):
        # Below a prefix they are fused already.
        self._tensors, self._prefix = tensors if prefix else _fused(tensors), prefix
        self.batch_invariant = batch_invariant

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._prefix + name]

    def get(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(self._prefix + name)

    def under(self, prefix: str) -> "Weights":
        return Weights(self._tensors, f"{self._prefix}{prefix}.", self.batch_invariant)

    def project(self, rows: Rows, name: str) -> torch.Tensor:
        """x Wᵀ (+ bias), [R, out]."""
        return linear(rows, *self._named(name), self.batch_invariant)

    def project_onto(
        self, base: torch.Tensor, rows: Rows, name: str, norm: Norm | None, out: torch.Tensor | None = None
    ) -> Rows:
        """base + x Wᵀ (+ bias), [R, out], under the norm that follows."""
        return linear_onto(base, rows, *self._named(name), self.batch_invariant, norm, out)

    def project_gated(self, rows: Rows, name: str) -> torch.Tensor:
        """silu(gate) · up, [R, out / 2], of a weight that stacks gate and up."""
        return linear_gated(rows, *self._named(name), self.batch_invariant)

    def _named(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self[f"{name}.weight"], self.get(f"{name}.bias")


def _queries(
    rows: Rows, weights: Weights, config: ModelConfig, turns, layer: int, kv: KVBuffer, metadata: AttentionMetadata
) -> torch.Tensor:
    """Rotated queries [R, A, D] of rows whose keys and values are written on the way."""
    norms = weights.get("q_norm.weight"), weights.get("k_norm.weight")
    tiling, ready = streaming(rows, weights["qkv_proj.weight"], weights.batch_invariant)
    if tiling and norms == (None, None) and config.head_dim % tiling.block_n == 0:
        weight, bias = weights["qkv_proj.weight"], weights.get("qkv_proj.bias")
        return project_rotate_and_write(tiling, ready, weight, bias, turns, metadata, kv, layer, config.num_heads)
    qkv_R = weights.project(ready, "qkv_proj")
    return rotate_and_write(qkv_R, *norms, config.rms_norm_eps, turns, metadata, kv, layer, config.num_heads)


def self_attention(
    base: torch.Tensor,
    rows: Rows,
    weights: Weights,
    config: ModelConfig,
    turns: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
    norm: Norm | None = None,
) -> Rows:
    """base + attention of rows, [R, H], under the norm that follows; the rows' KV is written."""
    query_RAD = _queries(rows, weights, config, turns, layer, kv, metadata)
    window, invariant = config.window(layer), weights.batch_invariant
    attended_RAD = attention(query_RAD, layer, kv, metadata, window, invariant=invariant)
    return weights.project_onto(base, Rows(attended_RAD.flatten(1)), "o_proj", norm)


def gated_mlp(rows: Rows, weights: Weights, norm: Norm | None = None, out: torch.Tensor | None = None) -> Rows:
    """x + down(silu(gate n) · up n), [R, H], of rows x whose norm gives n, under the norm that follows.

    out: where it goes, perhaps columns of a wider tensor.
    """
    grown = Rows(weights.project_gated(rows, "gate_up_proj"))
    return weights.project_onto(rows.values, grown, "down_proj", norm, out)
