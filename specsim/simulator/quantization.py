"""Formats of weights and KV: bytes of each and arithmetic of its products, by a config's quantization_config.

Hardware without a rate for a format's dtype reads the weights as they are and widens them to the activations' dtype.
One layer in the middle stands for all: checkpoints often leave the first or the last ones in 16 bits.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from specsim.core.errors import InputError, require, require_choice
from specsim.simulator.bounds import flag, integer, model_size, positive


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Format in which the weights of products are stored."""

    name: str
    bytes: float  # per weight, scales included
    dtype: str | None = None  # of the products, where the hardware has a rate for it; None: the activations'

    def __post_init__(self) -> None:
        positive("bytes", self.bytes)


HALF = WeightFormat("16 bits", 2.0)
FLOAT8 = WeightFormat("fp8", 1.0, "float8")  # activations are rounded to 8 bits too; their scales are not counted
MXFP4 = WeightFormat("mxfp4", 17 / 32)  # 4 bits, and 8 bits of scale for 32 weights; kernels widen it to 16 bits


def grouped(name: str, bits: int, size: int | None, group_bits: int, dtype: str | None = None) -> WeightFormat:
    """Make a format of `bits` per weight, and of `group_bits` for each group of `size`; None: for a whole row.

    The numbers of a whole row are not counted.
    """
    return WeightFormat(name, (bits + (group_bits / size if size else 0)) / 8, dtype)


NVFP4 = grouped("nvfp4", 4, 16, 8, "float4")  # activations are rounded to 4 bits too


METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "modelopt_fp4", "mxfp4")
KV_BYTES = {"bfloat16": 2.0, "fp8": 1.0}  # per number
_PREFIXES = ("model.layers.", "model.language_model.layers.", "language_model.model.layers.", "language_model.layers.")
_GROUPED = ("group", "tensor_group")  # strategies of compressed-tensors in which some weights share a scale
_OTHERS = ("tensor", "channel", "block", "token", "attn_head")
_MOST_BITS = 64
_ALGORITHMS = {"NVFP4": NVFP4, "FP8": FLOAT8, "W4A16_AWQ": grouped("awq", 4, 128, 16)}  # of NVIDIA's Model Optimizer
_ESCAPED = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)  # characters and sets that repeat nothing
_REPEATS = re.compile(r"[*+{]")
_NESTED = re.compile(r"\)[*+{]")
_MOST_REPEATS = 4
_LONGEST = 1000  # characters of an expression


@dataclass(frozen=True, slots=True)
class Quantization:
    """Formats of a checkpoint."""

    layers: WeightFormat = HALF  # attention and feed-forward, without experts
    experts: WeightFormat = HALF
    kv_bytes: float = KV_BYTES["bfloat16"]  # per number in the KV cache


def quantization_of(settings: Any, num_layers: int, has_experts: bool) -> Quantization:
    """Read a quantization_config, None without one; InputError for a method or a format that is not understood."""
    if settings in (None, {}, "none"):
        return Quantization()
    method = settings.get("quant_method", "none") if isinstance(settings, Mapping) else settings
    if method == "none":
        return Quantization()
    if not isinstance(settings, Mapping) or method not in METHODS:
        raise InputError("quantization_config", method, f"quant_method none, {', '.join(METHODS)}")
    kv_bytes = _kv_bytes(settings)
    if method == "mxfp4":
        return Quantization(HALF, MXFP4, kv_bytes)
    if method in ("awq", "gptq"):
        both = _weight_only(method, settings)
        return Quantization(both, both, kv_bytes)
    if method in ("fp8", "fbgemm_fp8"):
        return Quantization(FLOAT8, FLOAT8, kv_bytes)
    layers, experts = _grouped_formats(settings, num_layers // 2, has_experts)
    return Quantization(layers, experts, kv_bytes)


def _weight_only(method: str, settings: Mapping[str, Any]) -> WeightFormat:
    """Make the format of integers with a scale and a zero point for each group; products run in 16 bits."""
    bits = integer("bits", settings.get("bits", settings.get("w_bit")))
    require(bits in (2, 3, 4, 8), "bits", bits, f"2, 3, 4 or 8 in a quantization_config of {method}")
    size = settings.get("group_size", settings.get("q_group_size", 128))
    return grouped(method, bits, _group_size(size), 16 + bits)


def _grouped_formats(settings: Mapping[str, Any], layer: int, has_experts: bool) -> tuple[WeightFormat, WeightFormat]:
    """Find the formats of attention and feed-forward, and of experts, in a config of groups or of one algorithm."""
    ignored = _patterns(settings, "ignore") or _patterns(settings, "exclude_modules")
    groups = settings.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        formats = [(_targets(group), _format(group)) for group in groups.values()]
    else:
        inner = settings.get("quantization", settings)
        algorithm = inner.get("quant_algo") if isinstance(inner, Mapping) else None
        require(algorithm in _ALGORITHMS, "quant_algo", algorithm, f"{', '.join(_ALGORITHMS)}, or config_groups")
        ignored = ignored or _patterns(inner, "exclude_modules")
        formats = [(["Linear"], _ALGORITHMS[str(algorithm)])]
    attention = _of_module(f"{layer}.self_attn.q_proj", formats, ignored)
    if has_experts:
        return attention, _of_module(f"{layer}.mlp.experts.0.down_proj", formats, ignored)
    feed_forward = _of_module(f"{layer}.mlp.down_proj", formats, ignored)
    allowed = "one format for attention and feed-forward, as the cost of a layer has one"
    require(attention == feed_forward, "quantization_config", f"{attention.name}, {feed_forward.name}", allowed)
    return attention, feed_forward


def _of_module(name: str, formats: list[tuple[list[str], WeightFormat]], ignored: list[str]) -> WeightFormat:
    """Find the format of a module, which has 16 bits if it is ignored or if no group has it."""
    if any(_matches(name, pattern) for pattern in ignored):
        return HALF
    for targets, format_ in formats:
        if any(target == "Linear" or _matches(name, target) for target in targets):
            return format_
    return HALF


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern (an expression after `re:`, a pattern with *, or a name) covers a module of the layers."""
    names = [prefix + name for prefix in _PREFIXES]
    if pattern.startswith("re:"):
        _check_repeats(pattern)
        try:
            return any(re.match(pattern[3:], module) for module in names)
        except re.error as error:
            raise InputError("quantization_config", pattern, f"an expression that can be read ({error})") from error
    return any(fnmatchcase(module, pattern) or module.startswith(pattern + ".") for module in names)


def _check_repeats(pattern: str) -> None:
    """Refuse an expression that could take for ever on the names of modules."""
    is_short = len(pattern) <= _LONGEST
    bare = _ESCAPED.sub("", pattern) if is_short else ""
    is_quick = is_short and not _NESTED.search(bare) and len(_REPEATS.findall(bare)) <= _MOST_REPEATS
    allowed = f"an expression without a repeated group, of at most {_MOST_REPEATS} repeats"
    require(is_quick, "quantization_config", pattern[:_LONGEST], allowed)


def _format(group: Any) -> WeightFormat:
    """Read the format of a group of compressed-tensors: the weights', and the activations' for the products."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise InputError("config_groups", group, "groups with weights")
    bits = model_size("num_bits", weights.get("num_bits"), most=_MOST_BITS)
    kind = weights.get("type", "int")
    require(kind in ("int", "float"), "type", kind, "int or float")
    activations = group.get("input_activations")
    dtype = f"{kind}{bits}" if isinstance(activations, Mapping) and activations.get("num_bits") == bits else None
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if size else "channel")
    require_choice("strategy", strategy, (*_GROUPED, *_OTHERS))
    if strategy not in _GROUPED:
        return grouped("compressed-tensors", bits, None, 0, dtype)
    size = _group_size(size)
    if (kind, bits) == ("float", 4):
        return MXFP4 if size == 32 else grouped("nvfp4", 4, size, 8, dtype)
    zero = 0 if flag("symmetric", weights.get("symmetric", True)) else bits
    return grouped("compressed-tensors", bits, size, 16 + zero, dtype)


def _targets(group: Any) -> list[str]:
    return _patterns(group, "targets") if isinstance(group, Mapping) and group.get("targets") else ["Linear"]


def _patterns(settings: Any, name: str) -> list[str]:
    values = settings.get(name) if isinstance(settings, Mapping) else None
    if values is not None and not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        raise InputError(name, values, "a list of texts")
    return values or []


def _group_size(size: Any) -> int | None:
    """Read the number of weights that share a scale; None for a whole row."""
    if size == -1:
        return None
    return integer("group_size", size)


def _kv_bytes(settings: Mapping[str, Any]) -> float:
    """Read the bytes per number of the KV cache that the checkpoint has scales for."""
    scheme = settings.get("kv_cache_scheme")
    require(scheme is None or isinstance(scheme, Mapping), "kv_cache_scheme", scheme, "an object")
    if scheme and scheme.get("num_bits") is not None:
        return model_size("num_bits", scheme["num_bits"], most=_MOST_BITS) / 8
    inner = settings.get("quantization", settings)
    algorithm = inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None
    require(algorithm in (None, "FP8", "NVFP4"), "kv_cache_quant_algo", algorithm, "FP8, NVFP4 or none")
    return {None: 2.0, "FP8": 1.0, "NVFP4": NVFP4.bytes}[algorithm]
