"""Oracle's EAGLE heads over a whole sequence, without a cache (arXiv 2401.15077, 2406.16858 and 2503.01840)."""

from typing import Any

import torch

from specsim.reference.oracle_draft import DraftNode, Row, draft_lanes, is_dropped
from specsim.reference.oracle_layer import layer
from specsim.reference.oracle_parts import Tensors, linear, norm
from specsim.reference.oracle_request import OracleRequest


def draft_eagle(request: OracleRequest, tokens: list[int], root: DraftNode, depth: int) -> list[DraftNode]:
    """Grow the candidates of an EAGLE-1/2 head below the root."""
    return draft_lanes(request, tokens, root, _eagle_row)


def draft_eagle3(request: OracleRequest, tokens: list[int], root: DraftNode, depth: int) -> list[DraftNode]:
    """Grow the candidates of an EAGLE-3 head below the root."""
    return draft_lanes(request, tokens, root, _eagle3_row)


def _eagle_row(request: OracleRequest, tokens: list[int], features_LF: torch.Tensor, rows: tuple[Row, ...]) -> Any:
    if is_dropped(request, features_LF, rows):
        return None
    tensors = request.draft_tensors
    token_ids = [*tokens[1:], *(token for token, _ in rows)]
    hidden_RH = torch.cat([features_LF, *(hidden[None] for _, hidden in rows)])
    embedding_RH = tensors["embed_tokens.weight"][token_ids]
    hidden = _eagle(request.draft_config.model, tensors, embedding_RH, hidden_RH)[-1]
    return hidden, request.draft_head @ hidden


def _eagle3_row(request: OracleRequest, tokens: list[int], features_LF: torch.Tensor, rows: tuple[Row, ...]) -> Any:
    if is_dropped(request, features_LF, rows):
        return None
    token_ids = [*tokens[1:], *(token for token, _ in rows)]
    return eagle3_forward(request, token_ids, features_LF, [hidden for _, hidden in rows])


def eagle3_forward(
    pair: Any, token_ids: list[int], features_MF: torch.Tensor, hiddens: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an EAGLE-3 head over rows (token, hidden): the last row's (hidden [H], draft logits).

    The hidden states of the first M rows are the target's features, fused; the rows after them have the given ones.
    pair: the oracle's request, or a target and a drafter of `in_dtype`.
    """
    config = pair.drafter.config
    tensors = pair.drafter.tensors
    embedding_RH = tensors.get("embed_tokens.weight", pair.target.tensors["model.embed_tokens.weight"])[token_ids]
    hidden_RH = torch.cat([_fused(config, tensors, features_MF), *(hidden[None] for hidden in hiddens)])
    hidden = _eagle3(config, tensors, embedding_RH, hidden_RH)[-1]
    normed = norm(tensors, "norm", hidden, config.model.rms_norm_eps)
    head = tensors.get("lm_head.weight", pair.target.tensors["lm_head.weight"])
    return normed if config.norm_output else hidden, head @ normed


def _fused(config: Any, tensors: Tensors, features_MF: torch.Tensor) -> torch.Tensor:
    """Project an EAGLE-3 head's features, after the norms that EAGLE-3.1 puts there (arXiv 2605.09992)."""
    eps = config.model.rms_norm_eps
    if config.norm_before_fc:
        features_MF = norm(tensors, "input_norm", features_MF, eps)
    if config.fc_norm:
        features = features_MF.unflatten(-1, (-1, config.target_hidden_size)).unbind(1)
        features = [norm(tensors, f"fc_norm.{index}", feature_MF, eps) for index, feature_MF in enumerate(features)]
        features_MF = torch.cat(features, dim=-1)
    return linear(tensors, "fc", features_MF)


def _eagle(config: Any, tensors: Tensors, embedding_RH: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
    hidden_RH = linear(tensors, "fc", torch.cat([embedding_RH, hidden_RH], dim=-1))
    for index in range(config.num_layers):
        name = f"layers.{index}"
        normed_RH = norm(tensors, f"{name}.input_layernorm", hidden_RH, config.rms_norm_eps) if index else hidden_RH
        hidden_RH, _ = layer(config, index, tensors, name, hidden_RH, normed_RH)
    return hidden_RH


def _eagle3(config: Any, tensors: Tensors, embedding_RH: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
    eps = config.model.rms_norm_eps
    embedding_RH = norm(tensors, "midlayer.input_layernorm", embedding_RH, eps)
    normed_RH = norm(tensors, "midlayer.hidden_norm", hidden_RH, eps)
    residual_RH = normed_RH if config.norm_before_residual else hidden_RH
    both = torch.cat([embedding_RH, normed_RH], dim=-1)
    hidden_RH, _ = layer(config.model, 0, tensors, "midlayer", residual_RH, both)
    for index in range(1, config.model.num_layers):
        normed_RH = norm(tensors, f"layers.{index}.input_layernorm", hidden_RH, eps)
        hidden_RH, _ = layer(config.model, index, tensors, f"layers.{index}", hidden_RH, normed_RH)
    return hidden_RH
