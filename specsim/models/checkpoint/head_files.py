"""Heads as files: EAGLE-3 and P-EAGLE in the layout of the EAGLE repository or of speculators, block drafters.

Sources: SafeAILab/EAGLE (`midlayer`, a flat config.json); vllm-project/speculators (`layers.0`, the layer's fields in
`transformer_layer_config`).
"""

from typing import Any, Literal, get_args

import torch

from specsim.core.block import BlockDrafterConfig
from specsim.core.drafter import BLOCK_KINDS, DrafterConfig
from specsim.core.eagle import Eagle3Config
from specsim.core.errors import InputError, require, require_choice
from specsim.core.p_eagle import PEagleConfig
from specsim.core.pair import DrafterCheckpoint
from specsim.models.checkpoint.block_files import block_fields
from specsim.models.checkpoint.layer_fields import layer_fields

LayoutName = Literal["eagle", "speculators", "z-lab", "deepspec"]
_LAYOUTS = ("eagle", "speculators")
_SPECULATORS = {"eagle3": "eagle3", "p-eagle": "peagle"}


def head_fields(config: DrafterConfig, layout: str) -> dict[str, Any]:
    """Make the config.json of a head.

    Feature layers are given as entered, with the name of this convention, which both layouts leave open.
    """
    require_choice("layout", layout, get_args(LayoutName))
    if isinstance(config, BlockDrafterConfig):
        return block_fields(config, layout)
    allowed = f"a drafter of kind {', '.join((*_SPECULATORS, *BLOCK_KINDS))}, as no other has two layouts"
    if not isinstance(config, Eagle3Config):
        raise InputError("draft", config.kind, allowed)
    require(layout in _LAYOUTS, "layout", layout, f"{' or '.join(_LAYOUTS)} for {config.kind}")
    fields: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "eagle_aux_hidden_state_convention": "entering",
    }
    fields |= {name: True for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)}
    if isinstance(config, PEagleConfig):
        fields |= {"parallel_drafting": True, "mask_token_id": config.mask_token_id}
    layer = layer_fields(config.model)
    if layout == "speculators":
        kind = {"speculators_model_type": _SPECULATORS[config.kind]}
        return kind | fields | {"transformer_layer_config": layer}
    return {"architectures": ["LlamaForCausalLMEagle3"]} | layer | fields


def head_tensors(checkpoint: DrafterCheckpoint, layout: str) -> dict[str, torch.Tensor]:
    """Name the tensors of a head as a layout does; none is changed."""
    first = "midlayer." if layout == "eagle" and checkpoint.config.kind == "eagle3" else "layers.0."
    return {
        f"{first}{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name: tensor
        for name, tensor in checkpoint.tensors.items()
    }
