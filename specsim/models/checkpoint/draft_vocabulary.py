"""Tables of a draft vocabulary: d2t (i64, target id = i + d2t[i]) and t2d (bool), of heads with fewer tokens."""

from collections.abc import Mapping
from pathlib import Path

import torch

from specsim.core.errors import InputError


def with_vocabulary(tensors: Mapping[str, torch.Tensor], folder: Path, vocab_size: int) -> dict[str, torch.Tensor]:
    """Convert d2t, where there is one, to i64 and t2d to bool, and check that they are inverse.

    t2d is made where the files have only d2t. Target ids ascend with draft ids, so that ties and sums over a
    distribution are the same in either numbering.
    """
    if "d2t" not in tensors:
        return dict(tensors)
    d2t = tensors["d2t"].long()
    target_ids = d2t + torch.arange(len(d2t))
    outside = ((target_ids < 0) | (target_ids >= vocab_size)).nonzero().flatten().tolist()
    if outside:
        allowed = f"an offset to a target id of 0 to {vocab_size - 1}"
        raise InputError(f"d2t[{outside[0]}] in {folder}", int(d2t[outside[0]]), allowed)
    falling = (target_ids.diff() <= 0).nonzero().flatten().tolist()
    if falling:
        before = int(target_ids[falling[0]])
        place = falling[0] + 1
        allowed = f"an offset to a target id above {before}, that of draft id {place - 1}"
        raise InputError(f"d2t[{place}] in {folder}", int(d2t[place]), allowed)
    t2d = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, target_ids, True)
    differing = (tensors.get("t2d", t2d).bool() != t2d).nonzero().flatten().tolist()
    if differing:
        allowed = f"{t2d[differing[0]].item()}, as d2t has it"
        raise InputError(f"t2d[{differing[0]}] in {folder}", not t2d[differing[0]].item(), allowed)
    return {**tensors, "d2t": d2t, "t2d": t2d}
