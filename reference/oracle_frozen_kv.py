"""Oracle's drafter on frozen KV, after Gemma 4's assistants: one query row over the target's keys and values."""

import math
from typing import Any

import torch

from specsim.reference.oracle_draft import DraftNode, Row, draft_lanes
from specsim.reference.oracle_forward import target_forward
from specsim.reference.oracle_layer import attention_weights, feed_forward, project_heads
from specsim.reference.oracle_parts import linear, norm
from specsim.reference.oracle_request import OracleRequest


def draft_frozen_kv(request: OracleRequest, tokens: list[int], root: DraftNode, depth: int) -> list[DraftNode]:
    """Grow the candidates of a drafter on the target's KV below the root."""
    return draft_lanes(request, tokens, root, _row)


def _row(request: OracleRequest, tokens: list[int], features_LF: torch.Tensor, rows: tuple[Row, ...]) -> Any:
    """Run the last token, which sees no other draft."""
    token, handed_on = rows[-1] if rows else (tokens[-1], None)
    return frozen_kv_row(request, tokens[:-1], token, handed_on)


def frozen_kv_row(
    request: OracleRequest, prefix: list[int], token: int, handed_on: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one token after the tokens x_0..x_(L-1): (hidden [H] that the head reads, logits [V]).

    handed_on: that hidden of the row before it, None for the root, which reads the target's.
    """
    model = request.draft_config.model
    tensors = request.draft_tensors
    target = request.target
    if handed_on is None:
        hidden = target_forward(target.config, target.tensors, prefix, ())[1][-1]
    else:
        hidden = linear(tensors, "post_projection", handed_on)
    embedded = target.tensors["model.embed_tokens.weight"][token]
    row_1H = linear(tensors, "pre_projection", torch.cat([embedded, hidden]))[None]
    for layer in range(model.num_layers):
        name = f"layers.{layer}"
        normed = norm(tensors, f"{name}.input_layernorm", row_1H, model.rms_norm_eps)
        row_1H, _ = feed_forward(model, layer, tensors, name, row_1H + _attention(request, prefix, layer, normed))
    read_H = norm(tensors, "norm", row_1H, model.rms_norm_eps)[0]
    return read_H, linear(tensors, "lm_head", read_H)


def _attention(request: OracleRequest, prefix: list[int], layer: int, normed_1H: torch.Tensor) -> torch.Tensor:
    """Attend from one row to the keys of the last target layer with the same kind of attention."""
    model = request.draft_config.model
    shape = model.layers[layer].attention
    target = request.target.config
    tensors = request.target.tensors
    kinds = [target.window(index) is None for index in range(target.num_layers)]
    source = max(index for index, is_full in enumerate(kinds) if is_full == (shape.window is None))
    entering_LH = target_forward(target, tensors, prefix, (source,))[1]
    rows_LH = norm(tensors, f"model.layers.{source}.input_layernorm", entering_LH, target.rms_norm_eps)
    heads = target.layers[source].attention
    name = f"model.layers.{source}.self_attn"
    key, value = (
        project_heads(target, heads, tensors, name, part, rows_LH).repeat_interleave(
            shape.num_heads // heads.num_kv_heads, dim=0
        )
        for part in "kv"
    )
    position = len(prefix) - (request.draft_config.position == "last")
    name = f"layers.{layer}.self_attn"
    query = project_heads(model, shape, request.draft_tensors, name, "q", normed_1H, first=position)
    is_unseen = position - torch.arange(len(prefix)) >= (shape.window or math.inf)
    scores_A1L = (query @ key.mT * shape.head_dim**-0.5).masked_fill(is_unseen, -math.inf)
    weights_A1L = attention_weights(scores_A1L, request.draft_tensors.get(f"{name}.sinks"))
    attended_1H = (weights_A1L @ value).transpose(0, 1).flatten(1)
    return linear(request.draft_tensors, f"{name}.o_proj", attended_1H)
