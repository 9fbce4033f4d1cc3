"""P-EAGLE heads, in the layout of the EAGLE repository or of speculators.

Tensors: those of an EAGLE-3 head, mask_hidden [features · target H], and layers.i.* for every layer after the first.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from specsim.core.eagle import PEagleConfig
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import DrafterFormat, DrafterLayout, HeadWriter
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.weights import Stored
from specsim.models.drafters.eagle import check_fit, read_head
from specsim.models.drafters.eagle3 import (
    LAYOUTS,
    arranged,
    config_values,
    eagle3_layout,
    first_layer,
    head_fields,
    load_tensors,
)

_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


def _matches(fields: Fields, names: Collection[str], is_wanted: bool) -> bool:
    has_mask_token = "fc.weight" in names and any(fields.get(name) is not None for name in _MASK_TOKENS)
    return has_mask_token or fields.flag("parallel_drafting") or "mask_hidden" in names


def _layout(config: PEagleConfig) -> DrafterLayout:
    """List the tensors of an EAGLE-3 head, with the features that its mask rows read."""
    required, optional = eagle3_layout(config)
    return DrafterLayout(required | {"mask_hidden": required["fc.weight"][1:]}, optional)


def _load(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    """Load a head whose mask_hidden is stored with leading dimensions of 1, or without."""
    flat = [
        entry._replace(tensor=entry.tensor.flatten()) if entry.key.endswith("mask_hidden") else entry
        for entry in stored
    ]
    config = _config(fields, target)
    return load_tensors(config, _layout(config), flat, fields.file.parent)


def _config(fields: Fields, target: ModelConfig) -> PEagleConfig:
    head = read_head(fields, target)
    values = config_values(head, target)
    config = PEagleConfig(**values, mask_token_id=_mask_token_id(head.fields, head.model))
    check_fit(config, target, fields.file)
    return config


def _mask_token_id(fields: Fields, model: ModelConfig) -> int:
    """Read the token of a head's mask rows, under one of the names that vllm-project/vllm reads."""
    ids = {name: fields.integer(name, least=0) for name in _MASK_TOKENS if fields.get(name) is not None}
    name = next(iter(ids), _MASK_TOKENS[0])
    allowed = (
        f"the id of the mask token, 0 to {model.vocab_size - 1}, in {' or '.join(_MASK_TOKENS)} (by default SpecForge "
        "trains with the pad token of the target's tokenizer, or 0 without one; speculators with its mask token)"
    )
    if not ids or len({*ids.values()}) > 1 or ids[name] >= model.vocab_size:
        raise fields.error(name, allowed)
    return ids[name]


def _config_json(config: PEagleConfig, layout: str) -> dict[str, Any]:
    fields = head_fields(config) | {"parallel_drafting": True, "mask_token_id": config.mask_token_id}
    return arranged(fields, config.model, layout, "peagle", "PEagleDraftModel")


def _tensors(tensors: Mapping[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """Rename the first layer's tensors, and store mask_hidden as a row of a batch, [1, 1, size], in speculators."""
    mask = {"mask_hidden": tensors["mask_hidden"][None, None]} if layout == "speculators" else {}
    return first_layer(tensors) | mask


FORMAT = DrafterFormat(
    precedence=2,
    matches=_matches,
    load=_load,
    layout=_layout,
    speculators="peagle",
    writer=HeadWriter(LAYOUTS, _config_json, _tensors),
)
