"""Latent attention (DeepSeek-V2, arXiv 2405.04434), with the projection of keys and values absorbed."""

import torch

from specsim.core.target import LatentAttention
from specsim.fast.attention import Scores, attention
from specsim.fast.layers import Weights
from specsim.fast.model.head_product import head_product
from specsim.fast.model.latent_rows import write_latent
from specsim.fast.model.rotary import Forward
from specsim.fast.model.rows import Norm, Rows, rms_norm

_EPS = 1e-6  # of the norms of latent vectors, whatever the model's


def latent_attention_onto(
    base: torch.Tensor,
    rows: Rows,
    weights: Weights,
    own: LatentAttention,
    layer: int,
    forward: Forward,
    norm: Norm | None = None,
) -> Rows:
    """Compute base + latent attention of rows, [R, H], write their KV, and prepare the next norm.

    Queries are multiplied by each head's key projection, so that all heads read the latent vectors as they are stored;
    what they read is multiplied by the head's value projection (DeepSeek-V2, arXiv 2405.04434).
    """
    num_rows = len(rows.values)
    projected_RAQ, latent_RL = _latent_projections(rows, weights, own)
    key_weight, value_weight = (
        weights["kv_b_proj.weight"].view(own.num_heads, -1, own.latent_rank).split([own.nope_dim, own.value_dim], dim=1)
    )
    query_RAL = projected_RAQ.new_empty(num_rows, own.num_heads, own.latent_rank + own.rope_dim)
    head_product(projected_RAQ[..., : own.nope_dim], key_weight.transpose(1, 2), query_RAL[..., : own.latent_rank])
    write_latent(
        query_RAL[..., own.latent_rank :],
        forward.layer_kv(layer),
        projected_RAQ[..., own.nope_dim :],
        latent_RL,
        Norm(weights["kv_a_layernorm.weight"], _EPS),
        forward.turns,
        forward.metadata.slots,
    )
    scores = Scores(scale=own.scale, turned=own.rope_dim)
    invariant = weights.batch_invariant
    read_RAL = attention(query_RAL, layer, forward.kv, forward.metadata, scores, invariant=invariant)
    out_RAV = read_RAL.new_empty(num_rows, own.num_heads, own.value_dim)
    head_product(read_RAL, value_weight, out_RAV)
    return weights.project_onto(base, Rows(out_RAV.flatten(1)), "o_proj", norm)


def _latent_projections(rows: Rows, weights: Weights, own: LatentAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Project rows to queries [R, A, nope + rope] and latent vectors with the rotated channels, [R, rank + rope]."""
    if own.query_rank is None:
        ready = Rows(rows.applied())
        query_R = weights.project(ready, "q_proj")
        latent_RL = weights.project(ready, "kv_a_proj_with_mqa")
    else:
        both_R = weights.project(rows, "qkv_a_proj")
        latent_RL = both_R[:, own.query_rank :]
        compressed = rms_norm(both_R[:, : own.query_rank], weights["q_a_layernorm.weight"], _EPS)
        query_R = weights.project(Rows(compressed), "q_b_proj")
    return query_R.unflatten(-1, (own.num_heads, -1)), latent_RL
