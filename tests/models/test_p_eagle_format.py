"""P-EAGLE heads load from the layout of vLLM and from that of speculators, and bad ones are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specsim.core.eagle import PEagleConfig
from specsim.core.errors import InputError
from specsim.models.checkpoint import load_drafter
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.tiny_config import tiny_config

SIZES = dict(vocab_size=40, hidden_size=24, intermediate_size=20, head_dim=6)
TARGET = tiny_config(num_layers=4, **SIZES)
HEAD = PEagleConfig(tiny_config(num_layers=3, **SIZES), 30, 24, (1, 2, 3))
LAYER = {"num_hidden_layers": 3, "model_type": "llama"}
FEATURES = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "eagle_aux_hidden_state_convention": "entering"}
FIELDS = {
    "vllm": LAYER | FEATURES | {"draft_vocab_size": 30, "pard_token": 39},
    "speculators": {"speculators_model_type": "peagle", "transformer_layer_config": LAYER, "draft_vocab_size": 30}
    | {"mask_token_id": 39, "norm_before_residual": True}
    | FEATURES,
}


def drawn() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in drafter_layout(HEAD).required.items()}
    return tensors | {"d2t": torch.arange(30) // 3}


def stored(tensors: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Name tensors as published ones, with the leading dimensions that training code gives mask_hidden."""
    names = {key: key.replace("midlayer", "layers.0") for key in tensors}
    named = {f"{prefix}{names[key]}": tensor for key, tensor in tensors.items()}
    return named | {f"{prefix}mask_hidden": tensors["mask_hidden"][None, None]}


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("form", FIELDS)
def test_every_tensor_is_read(form: str, prefix: str, tmp_path: Path, published):
    own = drawn()
    drafter = load_drafter(published.save(tmp_path, FIELDS[form], stored(own, prefix)), TARGET)
    assert {key: drafter.tensors[key].tolist() for key in own} == {key: each.tolist() for key, each in own.items()}
    config = drafter.config
    assert (config.kind, config.mask_token_id, config.model.num_layers) == ("p-eagle", 39, 3)
    assert (config.feature_layers, config.draft_vocab_size) == ((1, 2, 3), 30)
    assert config.norm_before_residual is (form == "speculators")


@pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_every_name_of_the_mask_token(name: str, tmp_path: Path, published):
    fields = {key: value for key, value in FIELDS["vllm"].items() if key != "pard_token"}
    folder = published.save(tmp_path, fields | {name: 7, "parallel_drafting": True}, stored(drawn()))
    assert load_drafter(folder, TARGET).config.mask_token_id == 7


CONFIG = "/config.json"


@pytest.mark.parametrize(
    ("changes", "without", "name", "file"),
    [
        ({"pard_token": None}, "", "mask_token_id", CONFIG),
        ({"pard_token": 40}, "", "pard_token", CONFIG),  # outside the vocabulary
        ({"pard_token": "<mask>"}, "", "pard_token", CONFIG),
        ({"ptd_token_id": 5}, "", "pard_token", CONFIG),  # two tokens
        ({"eagle_aux_hidden_state_convention": None}, "", "eagle_aux_hidden_state_convention", CONFIG),
        # Zeros in place of learned features, as some readers take, would draft something else.
        ({"parallel_drafting": True}, "mask_hidden", "mask_hidden", ""),
        ({}, "mask_hidden", "mask_hidden", ""),  # which only heads with a mask token have
        ({}, "lm_head.weight", "lm_head.weight", ""),  # which a head for fewer tokens needs
    ],
)
def test_bad_heads_are_refused(changes: dict[str, Any], without: str, name: str, file: str, tmp_path: Path, published):
    tensors = {key: tensor for key, tensor in stored(drawn()).items() if key != without}
    folder = published.save(tmp_path, FIELDS["vllm"] | changes, tensors)
    with pytest.raises(InputError, check=lambda error: error.name == f"{name} in {folder}{file}"):
        load_drafter(folder, TARGET)


@pytest.mark.parametrize("form", FIELDS)
def test_a_head_for_the_whole_vocabulary_may_borrow_lm_head(form: str, tmp_path: Path, published):
    """Its own one, if it has one, is read; d2t is the identity and may be left out."""
    whole = replace(HEAD, draft_vocab_size=40)
    layout = drafter_layout(whole)
    assert "lm_head.weight" in layout.optional
    own = {key: torch.randn(shape) for key, shape in layout.required.items()}
    fields = FIELDS[form] | {"draft_vocab_size": 40}
    for extra in ({}, {"lm_head.weight": torch.randn(40, 24)}):
        folder = published.save(tmp_path / str(len(extra)), fields, stored(own | extra))
        found = load_drafter(folder, TARGET)
        assert found.tensors.keys() >= (own | extra).keys()
        assert ("lm_head.weight" in found.tensors) is bool(extra)
        assert all(torch.equal(found.tensors[key], each) for key, each in (own | extra).items())
