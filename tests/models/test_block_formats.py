"""Block drafters load from the formats of z-lab's DFlash, DeepSpec's DSpark and speculators."""

from dataclasses import replace
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
NON_CAUSAL = "sliding_window_non_causal"
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


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
IDS = ZLAB["dflash_config"]


@pytest.mark.parametrize(
    ("form", "changes", "windows", "causal_layers"),
    [
        ("z-lab", MIXED, (5, None), (0,)),
        ("z-lab", SLIDING, (5, 5), (0, 1)),
        ("z-lab", MIXED | {"is_causal": False}, (5, None), ()),
        ("z-lab", MIXED | {"is_causal": True}, (5, None), (0, 1)),
        ("z-lab", MIXED | {"is_causal": None}, (5, None), (0,)),
        ("z-lab", {"is_causal": True}, (None, None), (0, 1)),
        ("z-lab", {"dflash_config": IDS | {"causal": True}}, (None, None), (0, 1)),  # JetSpec, as NeMo writes it
        ("z-lab", {"dflash_config": IDS | {"causal_head": True}}, (None, None), (0, 1)),  # as JetSpec itself does
        ("z-lab", MIXED | {"dflash_config": IDS | {"causal": False}, "is_causal": False}, (5, None), ()),
        ("deepspec", MIXED, (5, None), (0,)),
        ("speculators dflash", {"transformer_layer_config": LAYER | SLIDING, NON_CAUSAL: False}, (5, 5), (0, 1)),
        ("speculators dflash", {"transformer_layer_config": LAYER | MIXED, NON_CAUSAL: False}, (5, None), (0,)),
        ("speculators dspark", {"transformer_layer_config": LAYER | MIXED, NON_CAUSAL: True}, (5, None), ()),
        ("speculators dspark", {NON_CAUSAL: False}, (None, None), ()),
    ],
)
def test_windows_and_causal_layers(
    form: str, changes: dict[str, Any], windows: tuple, causal_layers: tuple, tmp_path: Path, published
):
    """Layers with a window are causal unless a field decides otherwise, and no others in speculators."""
    folder, _ = folder_of(published, tmp_path, form, **changes)
    config = load_drafter(folder, TARGET).config
    assert (config.model.sliding_windows, config.causal_layers) == (windows, causal_layers)


@pytest.mark.parametrize(("num_layers", "ids"), [(1, [3]), (2, [1, 3]), (3, [1, 2, 3])])
def test_layer_ids_are_spread_by_default(num_layers: int, ids: list[int], tmp_path: Path, published):
    """Round(1 + j(n-4)/(m-1)) are outputs, n//2 alone, for n = 6 target layers."""
    config = DFlashConfig(replace(MODEL, layers=MODEL.layers[:1] * num_layers), 40, 24, tuple(ids), block=DFLASH)
    tensors = {name: torch.randn(shape) for name, shape in drafter_layout(config).required.items()}
    changes = {"num_hidden_layers": num_layers, "dflash_config": {"mask_token_id": 39}}
    folder = published.save(tmp_path, ZLAB | changes, tensors)
    assert load_drafter(folder, TARGET).config.feature_layers == tuple(layer + 1 for layer in ids)


def test_a_dspark_drafter_of_specforge(tmp_path: Path, published):
    """All its fields are in dflash_config, and rows draft the next token."""
    heads = {name: DEEPSPEC[name] for name in DEEPSPEC if name.startswith(("markov", "confidence", "enable"))}
    nested = {"target_layer_ids": [-1, 3], "mask_token_id": 38, "projector_type": "dspark", "attention_mode": "gqa"}
    fields = ZLAB | {"dflash_config": nested | heads | {"confidence_head_alpha": 1.0}}
    _, tensors = folder_of(published, tmp_path / "deepspec", "deepspec")
    found = load_drafter(published.save(tmp_path / "specforge", fields, tensors), TARGET)
    assert found.config == load_drafter(tmp_path / "deepspec", TARGET).config


@pytest.mark.parametrize(
    ("form", "changes", "name"),
    [
        ("z-lab", {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 39, "topk": 4}}, "dflash_config"),
        ("z-lab", {"dflash_config": {"mask_token_id": 39}, "num_target_layers": 8}, "target_layer_ids"),
        ("z-lab", {"dflash_config": IDS | {"attention_mode": "mla"}}, "attention_mode"),
        ("z-lab", {"dflash_config": IDS | {"projector_type": "domino"}}, "projector_type"),
        ("z-lab", {"dflash_config": IDS | {"use_swa": True}}, "dflash_config"),
        ("z-lab", {"dflash_config": IDS | {"causal": True}, "is_causal": False}, "causal"),
        ("z-lab", {"is_causal": "yes"}, "is_causal"),
        ("z-lab", MIXED | {"sliding_window": 3, "is_causal": False}, "sliding_window"),
        ("z-lab", MIXED | {NON_CAUSAL: False}, NON_CAUSAL),
        ("z-lab", MIXED | {"use_sliding_window": False}, "use_sliding_window"),
        ("speculators dflash", {"is_causal": True}, "is_causal"),
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
            NON_CAUSAL,  # which some readers take for true where it is missing, others for false
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
