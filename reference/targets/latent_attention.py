"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), with the projection of keys and values absorbed."""

import torch

from specsim.core.pool import KVBuffer
from specsim.core.target import LatentAttention
from specsim.reference.attention import AttentionMetadata, Scores, attention
from specsim.reference.layers import Weights, rms_norm, rotate

_EPS = 1e-6  # of the norms of latent vectors, whatever the model's


def latent_attention(
    x_RH: torch.Tensor,
    weights: Weights,
    shape: LatentAttention,
    inverse_D: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Write c = [norm(latent) | rotated key] of each row, attend to it with all heads, and project back: [R, H].

    With kv_b = [Wk; Wv] of a head, its key is [Wk latent | rotated key] and its value Wv latent. So its score is
    [Wkᵀ q | rotated q] · c, and its output Wv (Σ a · latent).
    """
    plain_RAN, turned_RAT = _queries(x_RH, weights, shape).split([shape.nope_dim, shape.rope_dim], dim=-1)
    latent, key = weights.project(x_RH, "kv_a_proj_with_mqa").split([shape.latent_rank, shape.rope_dim], dim=-1)
    latent = rms_norm(latent, weights["kv_a_layernorm.weight"], _EPS)
    turned_RAT = rotate(turned_RAT, metadata.positions, inverse_D, shape.rope)
    key = rotate(key[:, None], metadata.positions, inverse_D, shape.rope)
    row_R1C = torch.cat([latent[:, None], key], dim=-1)
    kv.write(layer, metadata.slots, row_R1C, row_R1C[..., : shape.latent_rank])
    both_AML = weights["kv_b_proj.weight"].unflatten(0, (shape.num_heads, -1))
    key_ANL, value_AVL = both_AML.split([shape.nope_dim, shape.value_dim], dim=1)
    query_RAC = torch.cat([torch.einsum("ran,anl->ral", plain_RAN, key_ANL), turned_RAT], dim=-1)
    scores = Scores(shape.window, scale=shape.scale, first_columns=shape.first_columns)
    attended_RAL = attention(query_RAC, layer, kv, metadata, scores)
    return weights.project(torch.einsum("ral,avl->rav", attended_RAL, value_AVL).flatten(1), "o_proj")


def _queries(x_RH: torch.Tensor, weights: Weights, shape: LatentAttention) -> torch.Tensor:
    """Compute the queries of all heads, [R, A, channels], in one projection or through a normed latent vector."""
    if shape.query_rank is None:
        query = weights.project(x_RH, "q_proj")
    else:
        latent = rms_norm(weights.project(x_RH, "q_a_proj"), weights["q_a_layernorm.weight"], _EPS)
        query = weights.project(latent, "q_b_proj")
    return query.unflatten(-1, (shape.num_heads, -1))
