"""Cost of a draft in weights that are read, which decides its time where a forward pass waits for memory."""

from collections.abc import Mapping

import torch

from specsim.core.pair import Pair

_LOOKED_UP = ("embed_tokens.weight", "d2t", "t2d")  # tables: a token needs one row of them
_HEAD = "lm_head.weight"


def draft_cost(pair: Pair) -> float:
    """Compute the weights that one draft reads, as a share of those that a forward pass of the target reads.

    A drafter without a head of its own reads the target's. A draft of MTP is made by one of its modules. A drafter
    without weights, and a pair without a drafter, cost nothing.
    """
    checkpoint = pair.checkpoint
    if checkpoint is None:
        return 0.0
    target = _weights(pair.target.tensors)
    own = _weights(checkpoint.tensors) / checkpoint.config.num_modules
    head = 0 if _HEAD in checkpoint.tensors else pair.target.tensors[_HEAD].numel()
    return (own + head) / target


def _weights(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for name, tensor in tensors.items() if not name.endswith(_LOOKED_UP))
