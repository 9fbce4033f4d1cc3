"""Oracle's language model as the drafter (arXiv 2211.17192), which reads token ids only."""

from typing import Any

import torch

from specsim.reference.oracle_draft import DraftNode, Row, draft_lanes
from specsim.reference.oracle_forward import target_forward
from specsim.reference.oracle_request import OracleRequest


def draft_standalone(request: OracleRequest, tokens: list[int], root: DraftNode, depth: int) -> list[DraftNode]:
    """Grow the candidates of a language model below the root."""
    return draft_lanes(request, tokens, root, _row)


def _row(request: OracleRequest, tokens: list[int], features_LF: torch.Tensor, rows: tuple[Row, ...]) -> Any:
    config = request.draft_config
    token_ids = [*(tokens if config.rows == "own" else tokens[1:]), *(token for token, _ in rows)]
    if len(token_ids) > request.max_len:
        return None
    logits_RV, hidden_RH = target_forward(config.model, request.draft_tensors, token_ids, ())
    return hidden_RH[-1], logits_RV[-1]
