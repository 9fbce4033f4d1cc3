"""Block drafters as files: config.json in the layout of z-lab (DFlash), of DeepSpec (DSpark) or of speculators.

Tensors have the same names in all three. Sources: z-lab/dflash (a flat config.json with `dflash_config`),
deepseek-ai/DeepSpec (all fields flat), vllm-project/speculators (the layers' fields in `transformer_layer_config`).
"""

from collections.abc import Mapping
from typing import Any

from specsim.core.block import BlockDrafterConfig
from specsim.core.errors import InputError, require
from specsim.models.checkpoint.layer_fields import layer_fields

LAYOUTS: Mapping[str, tuple[str, ...]] = {"dflash": ("z-lab", "speculators"), "dspark": ("deepspec", "speculators")}
_CLASSES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}


def block_fields(config: BlockDrafterConfig, layout: str) -> dict[str, Any]:
    """Make the config.json of a block drafter.

    Which token a row drafts is written even where a layout has a default for it, as tensors do not tell.
    """
    require(layout in LAYOUTS[config.kind], "layout", layout, f"{' or '.join(LAYOUTS[config.kind])} for {config.kind}")
    block = config.block
    layer = layer_fields(config.model)
    fields: dict[str, Any] = {
        "block_size": block.size,
        "sample_from_anchor": block.predicts == "next",
        "target_hidden_size": config.target_hidden_size,
        **_heads(config),
    }
    if layout == "speculators":
        fields |= {"aux_hidden_state_layer_ids": list(config.feature_layers), "mask_token_id": block.mask_token}
        if "layer_types" in layer:
            fields["sliding_window_non_causal"] = True
        fields["draft_vocab_size"] = config.draft_vocab_size
        return {"speculators_model_type": config.kind} | fields | {"transformer_layer_config": layer}
    if config.draft_vocab_size != config.model.vocab_size:
        raise InputError("layout", layout, "speculators for a drafter with a vocabulary of its own")
    ids = {"target_layer_ids": [layer - 1 for layer in config.feature_layers], "mask_token_id": block.mask_token}
    ids = {"dflash_config": ids} if layout == "z-lab" else ids
    return {"architectures": [_CLASSES[config.kind]]} | layer | fields | ids


def _heads(config: BlockDrafterConfig) -> dict[str, Any]:
    """List the fields of DSpark's heads."""
    block = config.block
    if config.kind == "dflash":
        return {}
    fields: dict[str, Any] = {
        "markov_rank": block.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": block.confidence != "none",
        "confidence_head_with_markov": block.confidence == "hidden_and_token",
    }
    return fields | ({"confidence_threshold": block.threshold} if block.threshold else {})
