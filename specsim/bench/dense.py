"""Independent forward in plain torch that checks a round, without kernels, pages or graphs.

Weights are cast tensor by tensor on their device, so a bf16 model of real size runs in float32 too. It differs from the
oracle's forward in its rows: a tree mask, and a prefix with given KV, which scenes with random KV need.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specsim.core.pair import DrafterCheckpoint, Pair
from specsim.core.target import ModelConfig

if TYPE_CHECKING:
    from specsim.reference.layers import Weights

Prefix = Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # of a layer, keys and values [C, KV heads, D]


class Cast(Mapping[str, torch.Tensor]):
    """Tensors by name, each cast to `dtype` when it is read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True, slots=True)
class DenseRows:
    """Rows of one request."""

    positions: torch.Tensor  # i64 [R]
    seen: torch.Tensor  # bool [R, C + R], visible columns of the prefix and rows, for each row

    @classmethod
    def causal(cls, count: int, device: torch.device | str) -> "DenseRows":
        """Make the rows of a text from its beginning."""
        seen = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        return cls(torch.arange(count, device=device), seen)

    @classmethod
    def tree(cls, prefix_len: int, positions: torch.Tensor, mask: torch.Tensor, with_prompt: bool) -> "DenseRows":
        """Make the rows of nodes after a prefix, which is either rows itself or given KV."""
        nodes = len(mask)
        behind = torch.cat([torch.ones(nodes, prefix_len, dtype=torch.bool, device=mask.device), mask], dim=1)
        if not with_prompt:
            return cls(positions, behind)
        prompt = cls.causal(prefix_len, mask.device)
        above = torch.nn.functional.pad(prompt.seen, (0, nodes), value=False)
        return cls(torch.cat([prompt.positions, positions]), torch.cat([above, behind]))


def target_forward(
    pair: Pair, ids: torch.Tensor, rows: DenseRows, dtype: torch.dtype, last: int, prefix: Prefix | None = None,
    feature_layers: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute (logits [last, V] of the last rows, features [R, F], the feature layers' inputs) in dtype."""
    from specsim.reference.layers import Weights, rms_norm

    model = pair.target.config
    tensors = Cast(pair.target.tensors, dtype)
    weights = Weights(tensors)
    eps = model.rms_norm_eps
    hidden = pair.target.tensors["model.embed_tokens.weight"][ids].to(dtype)
    entering = {}
    for layer in range(model.num_layers):
        entering[layer] = hidden if layer in feature_layers else None
        layer_weights = weights.under(f"model.layers.{layer}")
        normed = rms_norm(hidden, layer_weights["input_layernorm.weight"], eps)
        past = None if prefix is None else prefix(layer)
        hidden = _layer(hidden, normed, layer_weights, model, rows, model.window(layer), past)
    entering[model.num_layers] = hidden
    normed = rms_norm(hidden[-last:], weights["model.norm.weight"], eps)
    features = [entering[layer] for layer in feature_layers]
    return normed @ weights["lm_head.weight"].T, torch.cat(features, dim=-1) if features else hidden


HEAD = "eagle3"  # kind of the drafter whose forward is below


def head_of(pair: Pair) -> DrafterCheckpoint:
    """Give the pair's EAGLE-3 head."""
    if pair.checkpoint is None or pair.kind != HEAD:
        raise ValueError("the pair has no EAGLE-3 head")
    return pair.checkpoint


def head_forward(pair: Pair, ids: torch.Tensor, features: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the hidden state [H] of an EAGLE-3 head at the last row; features are one row behind."""
    from specsim.reference.layers import Weights, rms_norm

    head = head_of(pair)
    config = head.config
    model = config.model
    eps = model.rms_norm_eps
    weights = Weights(Cast(head.tensors, dtype))
    embedding = head.tensors.get("embed_tokens.weight", pair.target.tensors["model.embed_tokens.weight"])
    hidden = weights.project(features.to(dtype), "fc")
    layer = weights.under("midlayer")
    embedded = rms_norm(embedding[ids].to(dtype), layer["input_layernorm.weight"], eps)
    normed = rms_norm(hidden, layer["hidden_norm.weight"], eps)
    residual = normed if config.norm_before_residual else hidden
    both = torch.cat([embedded, normed], dim=-1)
    rows = DenseRows.causal(len(ids), ids.device)
    return _layer(residual, both, layer, model, rows, model.window(0), None)[-1]


def head_logits(pair: Pair, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the logits [draft V] of an EAGLE-3 head, in dtype, from a hidden state [H]."""
    from specsim.reference.layers import Weights, rms_norm

    head = head_of(pair)
    weights = Weights(Cast(head.tensors, dtype))
    eps = head.config.model.rms_norm_eps
    return weights.project(rms_norm(hidden.to(dtype), weights["norm.weight"], eps), "lm_head")


def _layer(
    residual: torch.Tensor,
    normed: torch.Tensor,
    weights: "Weights",
    model: ModelConfig,
    rows: DenseRows,
    window: int | None,
    past: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Add softmax attention of all rows at once, a group of query heads over one key head, and the MLP."""
    from specsim.reference.layers import gated_mlp, inverse_frequencies, rms_norm, rotate

    projections = weights.under("self_attn")
    heads = (projections.project(normed, f"{part}_proj").unflatten(-1, (-1, model.head_dim)) for part in "qkv")
    query, key, value = heads
    if projections.get("q_norm.weight") is not None:
        query = rms_norm(query, projections["q_norm.weight"], model.rms_norm_eps)
        key = rms_norm(key, projections["k_norm.weight"], model.rms_norm_eps)
    inverse = inverse_frequencies(model.rope).to(normed.device)
    query = rotate(query, rows.positions, inverse)
    key = rotate(key, rows.positions, inverse)
    if past is not None:
        key, value = (
            torch.cat([part.to(new_rows.dtype), new_rows]) for part, new_rows in zip(past, (key, value), strict=True)
        )
    grouped = query.unflatten(1, (model.num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # a head's group as rows
    scores = grouped @ key.permute(1, 2, 0) * model.head_dim**-0.5
    scores = scores.unflatten(1, (-1, len(normed))).masked_fill(~_in_window(rows, window, len(key)), -torch.inf)
    attended = scores.softmax(-1).flatten(1, 2) @ value.transpose(0, 1)
    attended = attended.unflatten(1, (-1, len(normed))).permute(2, 0, 1, 3).flatten(1)
    hidden = residual + projections.project(attended, "o_proj")
    normed = rms_norm(hidden, weights["post_attention_layernorm.weight"], model.rms_norm_eps)
    return hidden + gated_mlp(normed, weights.under("mlp"))


def _in_window(rows: DenseRows, window: int | None, columns: int) -> torch.Tensor:
    """Restrict the visible columns to the last `window` positions."""
    if window is None:
        return rows.seen
    before = torch.arange(columns - len(rows.positions), device=rows.positions.device)
    return rows.seen & (rows.positions[:, None] - torch.cat([before, rows.positions]) < window)
