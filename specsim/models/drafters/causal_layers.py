"""Layers of a block drafter whose rows see the block's rows up to their own, in a config.json.

In the layout of z-lab those are the layers with a window (z-lab's code, SGLang, vLLM), unless a field decides for every
layer: `is_causal` in these three, a nested `causal` in vLLM, `causal_head` in hao-ai-lab/JetSpec. In speculators they
are the same without such a field, unless `sliding_window_non_causal` is true.

A window is counted from each row, itself included, as these engines count it. speculators trains all rows of a block
with the window of its first row. Where later rows are seen, z-lab bounds how far, and others do not.
"""

from collections.abc import Mapping
from typing import Any

from specsim.core.block import BlockDrafterConfig
from specsim.core.errors import require
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.fields import Fields

EVERY_LAYER = ("is_causal", "causal", "causal_head")
NON_CAUSAL = "sliding_window_non_causal"


def read_causal_layers(fields: Fields, model: ModelConfig, is_of_speculators: bool) -> tuple[int, ...]:
    """Read the causal layers of a drafter with these layers."""
    names, others = ((NON_CAUSAL,), EVERY_LAYER) if is_of_speculators else (EVERY_LAYER, (NON_CAUSAL,))
    for name in others:
        if fields.get(name) is not None:
            raise fields.error(name, f"absent in this layout, which has {' or '.join(names)}")
    values = {name: fields.flag(name) for name in names if fields.get(name) is not None}
    windows = _windows(model)
    if len(set(values.values())) > 1:
        raise fields.error(max(values, key=EVERY_LAYER.index), f"equal to {min(values, key=EVERY_LAYER.index)}")
    if is_of_speculators and windows and not values:
        raise fields.error(NON_CAUSAL, "true or false: where it is missing, speculators reads false and vLLM true")
    value = next(iter(values.values()), None)
    if is_of_speculators:
        return () if value else tuple(windows)
    return tuple(windows) if value is None else tuple(range(model.num_layers)) if value else ()


def check_windows(config: BlockDrafterConfig, layer: Fields) -> None:
    """Raise InputError for a window that readers bound in different ways."""
    seen_both_ways = (window for index, window in _windows(config.model).items() if index not in config.causal_layers)
    if min(seen_both_ways, default=config.block.size) < config.block.size:
        allowed = f"at least block_size, {config.block.size}, where rows see later ones: readers differ in how far"
        raise layer.error("sliding_window", allowed)


def causal_fields(config: BlockDrafterConfig, layout: str) -> Mapping[str, Any]:
    """List the fields that name the causal layers, or raise InputError where a layout has none for them."""
    model = config.model
    windows = tuple(_windows(model))
    forms: dict[tuple[int, ...], dict[str, Any]]
    if layout == "speculators":
        forms = {(): {NON_CAUSAL: True}, windows: {NON_CAUSAL: False}} if windows else {(): {}}
        allowed = "none, or the layers with a window, in speculators"
    else:
        forms = {(): {"is_causal": False}, tuple(range(model.num_layers)): {"is_causal": True}, windows: {}}
        allowed = "none, all, or the layers with a window"
    require(config.causal_layers in forms, "causal_layers", config.causal_layers, allowed)
    return forms[config.causal_layers]


def _windows(model: ModelConfig) -> dict[int, int]:
    """Map the layers that have a window to it."""
    return {layer: window for layer, window in enumerate(model.sliding_windows) if window is not None}
