"""One rank's slices of experts that a checkpoint has stacked in one tensor, by the keys of published formats.

Every rank has some channels of each expert. The formats are those of specsim.models.checkpoint.expert_tensors.
"""

import re

from specsim.core.rank_part import RankPart, Span

_STACKED = r"(?:.*\.)?experts\.(gate_up|down)_proj(?:_(bias|blocks|scales))?"


def is_stacked(key: str) -> bool:
    """Check whether a key names a tensor of all experts of a layer."""
    return re.fullmatch(_STACKED, key) is not None


def stacked_span(part: RankPart, key: str, shape: tuple[int, ...], family: str) -> Span | None:
    """Find a rank's slice of such a tensor.

    GPT-OSS has its matrices transposed where they are not in MXFP4, and gate and up in alternate columns.
    """
    found = re.fullmatch(_STACKED, key)
    assert found, key
    projection, kind = found.groups()
    is_transposed = family == "gpt_oss" and kind is None
    if projection == "gate_up":
        return part.divided(key, shape, 2 if is_transposed else 1, parts=1 if family == "gpt_oss" else 2)
    if kind == "bias":
        return part.of_rank_0(shape)
    return part.divided(key, shape, 1 if is_transposed else 2)
