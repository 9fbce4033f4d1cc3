"""Forwards of the oracle's drafters below a round's root: the row that proposes a node's children."""

import torch

from specsim.reference.oracle_forward import draft_forward, target_forward
from specsim.reference.oracle_frozen_kv import frozen_kv_row
from specsim.reference.oracle_request import Request

Row = tuple[int, torch.Tensor]  # a drafted token, and the hidden state of the row that proposed it


def last_row(
    request: Request, tokens: list[int], features_LF: torch.Tensor, rows: tuple[Row, ...]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Run the drafter over a request's tokens x_0..x_L and the rows after them.

    Returns the last row's (hidden [H], draft logits), None where its position is at or beyond max_len.
    """
    drafted = [token for token, _ in rows]
    config = request.draft_config
    if config.kind == "standalone":
        token_ids = [*(tokens if config.rows == "own" else tokens[1:]), *drafted]
        if len(token_ids) > request.max_len:
            return None
        logits_RV, hidden_RH = target_forward(config.model, request.draft_tensors, token_ids, ())
        return hidden_RH[-1], logits_RV[-1]
    if config.kind == "frozen-kv":
        token = drafted[-1] if rows else tokens[-1]
        return frozen_kv_row(request, tokens[:-1], token, rows[-1][1] if rows else None)
    if len(features_LF) + len(rows) > request.max_len:
        return None
    return draft_forward(request, [*tokens[1:], *drafted], features_LF, [hidden for _, hidden in rows])
