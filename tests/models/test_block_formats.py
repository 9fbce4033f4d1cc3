"""Block drafters load from the formats of z-lab's DFlash, DeepSpec's DSpark and speculators."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specsim.core.block import BlockConfig, DFlashConfig, DSparkConfig
from specsim.core.errors import InputError
from specsim.models.checkpoint import load_drafter
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.tiny_config import tiny_config

Tensors = dict[str, torch.Tensor]
TARGET = tiny_config("qwen3", 6, vocab_size=40, hidden_size=24, intermediate_size=20, head_dim=6)
MODEL = tiny_config("qwen3", 2, vocab_size=40, hidden_size=24, intermediate_size=20, head_dim=6)
ZLAB = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 4,
    "num_target_layers": 6, "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 39},
}  # fmt: skip
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 4,
    "target_layer_ids": [-1, 3], "mask_token_id": 38, "num_anchors": 512, "markov_rank": 5,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
LAYER = {"model_type": "qwen3", "num_hidden_layers": 2}
SPECULATORS = {
    "speculators_model_type": "dspark", "block_size": 4, "aux_hidden_state_layer_ids": [2, 4], "mask_token_id": 7,
    "draft_vocab_size": 14, "markov_rank": 5, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": False, "sample_from_anchor": True, "transformer_layer_config": LAYER,
}  # fmt: skip
OWN_DFLASH = SPECULATORS | {"speculators_model_type": "dflash"}


def tensors_of(kind: str, block: BlockConfig, draft_vocab_size: int = 40) -> Tensors:
    make = DFlashConfig if kind == "dflash" else DSparkConfig
    config = make(MODEL, draft_vocab_size, 24, feature_layers=(2, 4), block=block)
    generator = torch.Generator().manual_seed(0)
    layout = drafter_layout(config).required
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in layout.items()}
    return tensors | (vocabulary() if draft_vocab_size < 40 else {})


def vocabulary() -> Tensors:
    return {"d2t": torch.arange(14) + 3}


DFLASH = BlockConfig(4, 39)
DSPARK = BlockConfig(4, 38, "next", markov_rank=5, confidence="hidden_and_token")


def folder_of(published, path: Path, form: str, **changes: Any) -> tuple[Path, Tensors]:
    """Write a checkpoint of a format."""
    fields, kind, block, size = {
        "z-lab": (ZLAB, "dflash", DFLASH, 40),
        "deepspec": (DEEPSPEC, "dspark", DSPARK, 40),
        "speculators dspark": (SPECULATORS, "dspark", BlockConfig(4, 7, "next", 5, "hidden"), 14),
        "speculators dflash": (OWN_DFLASH, "dflash", BlockConfig(4, 7), 14),
    }[form]
    tensors = tensors_of(kind, block, size)
    if form == "deepspec":
        tensors |= {"embed_tokens.weight": torch.randn(40, 24), "lm_head.weight": torch.randn(40, 24)}
    merged = {name: value for name, value in (fields | changes).items() if value is not ...}
    return published.save(path, merged, tensors), tensors


EXPECTED = {
    "z-lab": ("dflash", (2, 4), DFLASH, 40),
    "deepspec": ("dspark", (0, 4), DSPARK, 40),
    "speculators dspark": ("dspark", (2, 4), BlockConfig(4, 7, "next", 5, "hidden"), 14),
}


@pytest.mark.parametrize("form", EXPECTED)
def test_block_drafters_of_every_format(form: str, tmp_path: Path, published):
    folder, tensors = folder_of(published, tmp_path, form)
    found = load_drafter(folder, TARGET)
    config = found.config
    assert (config.kind, config.feature_layers, config.block, config.draft_vocab_size) == EXPECTED[form]
    assert (config.model.num_layers, config.model.hidden_size, config.target_hidden_size) == (2, 24, 24)
    assert tensors.items() >= {}.items()
    for name, tensor in tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


@pytest.mark.parametrize(("given", "predicts"), [(True, "next"), (False, "own"), (..., "own")])
def test_the_shift_of_a_dflash_drafter(given: Any, predicts: str, tmp_path: Path, published):
    changes = {} if given is ... else {"sample_from_anchor": given}
    folder, _ = folder_of(published, tmp_path, "z-lab", **changes)
    assert load_drafter(folder, TARGET).config.block.predicts == predicts


def test_the_threshold_of_a_confidence_head_is_a_field(tmp_path: Path, published):
    folder, _ = folder_of(published, tmp_path, "deepspec")
    assert load_drafter(folder, TARGET).config.block.threshold == 0.0
    found = load_drafter(folder, TARGET, {"confidence_threshold": 0.4})
    assert found.config.block.threshold == 0.4


def test_windows_of_a_block_drafter(tmp_path: Path, published):
    layer_types = ["sliding_attention", "full_attention"]
    folder, _ = folder_of(published, tmp_path, "z-lab", layer_types=layer_types, sliding_window=5)
    assert load_drafter(folder, TARGET).config.model.sliding_windows == (5, None)


@pytest.mark.parametrize(
    ("form", "changes", "name"),
    [
        ("z-lab", {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 39, "topk": 4}}, "dflash_config"),
        ("z-lab", {"dflash_config": {"mask_token_id": 39}}, "target_layer_ids"),
        ("z-lab", {"dflash_config": {"target_layer_ids": [1, 5], "mask_token_id": 39}}, "target_layer_ids"),
        ("z-lab", {"dflash_config": {"target_layer_ids": [3, 1], "mask_token_id": 39}}, "target_layer_ids"),
        ("z-lab", {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 40}}, "mask_token_id"),
        ("z-lab", {"block_size": 1}, "block_size"),
        ("z-lab", {"block_size": ...}, "block_size"),
        ("z-lab", {"model_type": "gemma4_text"}, "model_type"),
        ("z-lab", {"vocab_size": 41}, "vocab_size"),
        ("deepspec", {"markov_head_type": "gated"}, "markov_head_type"),
        ("deepspec", {"num_anchors": ...}, "sample_from_anchor"),
        ("speculators dspark", {"sample_from_anchor": ...}, "sample_from_anchor"),
        ("speculators dspark", {"aux_hidden_state_layer_ids": [2, 6]}, "aux_hidden_state_layer_ids"),
        ("speculators dspark", {"projector_type": "domino"}, "projector_type"),
        (
            "speculators dspark",
            {"transformer_layer_config": LAYER | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}},
            "sliding_window_non_causal",
        ),
    ],
)
def test_block_drafters_refused(form: str, changes: dict[str, Any], name: str, tmp_path: Path, published):
    folder, _ = folder_of(published, tmp_path, form, **changes)
    with pytest.raises(InputError, check=lambda error: error.name == f"{name} in {folder / 'config.json'}"):
        load_drafter(folder, TARGET)


def test_another_head_is_refused_by_its_tensor(tmp_path: Path, published):
    """DFlash2 adds a selector, whose weights no field of a DFlash config describes."""
    folder, tensors = folder_of(published, tmp_path, "z-lab")
    published.save(folder, ZLAB, tensors | {"selector.weight": torch.ones(3)})
    with pytest.raises(InputError) as caught:
        load_drafter(folder, TARGET)
    assert caught.value.name.startswith("selector.weight in ")
