"""Cost of a draft in weights that are read, which decides its time where a forward pass waits for memory."""

from collections.abc import Mapping

import torch

from specsim.core.arguments import check_arguments
from specsim.core.kinds import KINDS
from specsim.core.pair import Pair

_LOOKED_UP = ("embed_tokens.weight", "markov_w1.weight", "d2t", "t2d")  # tables: a token needs one row of them
_HEAD = "lm_head.weight"
_OF_EACH_DRAFT = ("markov_head.markov_w2.weight", "confidence_head.proj.weight", "confidence_head.proj.bias")


@check_arguments
def draft_cost(pair: Pair, num_steps: int = 1) -> float:
    """Compute the weights that one draft reads, as a share of those that a forward pass of the target reads.

    A drafter without a head of its own reads the target's. A draft is made by one of its modules, where it has several.
    If one forward makes all drafts, a draft counts its share of it, and the heads that run for each draft in whole. A
    drafter without weights, and a pair without a drafter, cost nothing.
    """
    checkpoint = pair.checkpoint
    if checkpoint is None:
        return 0.0
    target = _weights(pair.target.tensors)
    tensors = dict(checkpoint.tensors)
    head = tensors.pop(_HEAD, pair.target.tensors[_HEAD]).numel()
    if KINDS[checkpoint.config.kind].is_parallel:
        per_draft = _weights({name: tensors[name] for name in _OF_EACH_DRAFT if name in tensors})
        return ((_weights(tensors) - per_draft + head) / num_steps + per_draft) / target
    weights = _weights(tensors) / getattr(checkpoint.config, "num_modules", 1)
    return (weights + head) / target


def _weights(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for name, tensor in tensors.items() if not name.endswith(_LOOKED_UP))
