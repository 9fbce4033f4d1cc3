"""Rotary embedding, from a config.json of transformers 4 or 5."""

import math
from typing import Any

from specsim.core.errors import InputError, require_choice
from specsim.core.target import Rope
from specsim.models.checkpoint.fields import Fields

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_TYPES = ("default", "llama3", "yarn")


def read_rope(fields: Fields, size: int, interleaved: bool = False) -> Rope:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of transformers 4."""
    theta = {"rope_theta": fields.get("rope_theta", 10000.0)}
    given = [name for name in ("rope_parameters", "rope_scaling") if fields.get(name)] or ["rope_parameters"]
    settings = [(name, fields.mapping(name).filled(theta)) for name in given]
    first, *others = (
        Rope(rope.number("rope_theta"), size, _scaling(name, rope), interleaved) for name, rope in settings
    )
    if any(other != first for other in others):
        raise fields.error("rope_scaling", "equal to rope_parameters, rope_theta included, where both are given")
    return first


def attention_factor(factor: float, multiplier: float = 1.0) -> float:
    """Compute YaRN's factor of cosines and sines (arXiv 2309.00071, equation 22), 1 where nothing is stretched."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaling(name: str, rope: Fields) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    require_choice(f"rope_type in {rope.file}", kind, _TYPES)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise InputError(f"{name} in {rope.file}", dict(rope.values), "one setting for all layers")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise rope.error("partial_rotary_factor", "1")
    if kind == "default":
        return {}
    numbers = {"rope_type": kind, "factor": rope.number("factor")}
    return numbers | ({part: rope.number(part) for part in _LLAMA3} if kind == "llama3" else _yarn(rope))


def _yarn(rope: Fields) -> dict[str, Any]:
    """Read YaRN's numbers, with the factor of cosines and sines that transformers derives where none is given.

    mscale and mscale_all_dim are DeepSeek's: the factor is the ratio of theirs, and the latter scales the scores too.
    """
    factor = rope.number("factor")
    given = [rope.number(name) if rope.get(name) else 0.0 for name in ("mscale", "mscale_all_dim")]
    ratio = attention_factor(factor, given[0]) / attention_factor(factor, given[1])
    derived = ratio if all(given) else attention_factor(factor)
    return {
        "original_max_position_embeddings": rope.number("original_max_position_embeddings"),
        "beta_fast": rope.number("beta_fast", default=32.0),
        "beta_slow": rope.number("beta_slow", default=1.0),
        "truncate": rope.flag("truncate", default=True),
        "attention_factor": rope.number("attention_factor", default=derived),
        **({"mscale_all_dim": given[1]} if given[1] else {}),
    }
