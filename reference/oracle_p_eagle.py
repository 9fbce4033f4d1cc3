"""Drafts of the oracle from a P-EAGLE head (arXiv 2602.01469): one forward for every depth, without mask rows after it.

The row of depth d follows d-1 mask rows, which read the mask token and `mask_hidden`, projected like target features.
"""

import torch

from specsim.reference.oracle_draft import DraftNode
from specsim.reference.oracle_eagle import eagle3_forward
from specsim.reference.oracle_forward import target_forward
from specsim.reference.oracle_mtp import best_lanes, children, drafts
from specsim.reference.oracle_request import OracleRequest


def draft_p_eagle(request: OracleRequest, tokens: list[int], root: DraftNode, depth: int) -> list[DraftNode]:
    """Grow all candidates below the root: K children of every lane, the same for all lanes of a depth."""
    config = request.config
    shape = request.draft_config
    _, features_LF = target_forward(request.target.config, request.target.tensors, tokens[:-1], shape.feature_layers)
    mask_F = request.draft_tensors["mask_hidden"]
    pool: list[DraftNode] = []
    lanes = [root]
    for num_masks in range(config.num_steps):
        hidden = None
        draft_prob_V = None
        child_ids = list(range(config.topk))
        scores_K = torch.full((config.topk,), 0.0 if config.score == "prob" else -torch.inf)
        if len(features_LF) + num_masks <= request.max_len:
            token_ids = [*tokens[1:], *[shape.mask_token_id] * num_masks]
            features_RF = torch.cat([features_LF, mask_F.expand(num_masks, -1)])
            hidden, logits = eagle3_forward(request, token_ids, features_RF, [])
            child_ids, scores_K, draft_prob_V = drafts(request, request.drafter, logits, len(tokens) - 1, num_masks)
        source = DraftNode((), None, 0, 0.0, draft_prob_V, hidden, ())
        level = children(request, lanes, child_ids, scores_K, source)
        lanes = best_lanes(request, level)
        pool += level
    return pool
