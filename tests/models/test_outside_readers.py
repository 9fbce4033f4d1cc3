"""Checkpoints as transformers reads them: rotary embedding, windows, scores, biases and shapes of every layer.

A round trip through our own writer and reader cannot see a mistake that both make.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specsim.core.block import BlockConfig, DFlashConfig
from specsim.core.target import HeadAttention, ModelConfig
from specsim.models.checkpoint import load_drafter
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.layout import target_layout
from specsim.models.checkpoint.model_config import model_config
from specsim.models.convert import convert, head_fields
from specsim.models.tiny_config import tiny_config
from specsim.reference.layers import inverse_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 8.0, "original_max_position_embeddings": 16}
ROPES = {
    "default": {},
    "theta": {"rope_theta": 5e5},
    "llama3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
    "yarn": {"rope_scaling": {"rope_type": "yarn"} | YARN},
    "yarn, one scale": {"rope_scaling": {"rope_type": "yarn", "mscale": 0.7} | YARN},
    "yarn, the other scale": {"rope_scaling": {"rope_type": "yarn", "mscale_all_dim": 0.7} | YARN},
    "yarn, both scales": {"rope_scaling": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.3} | YARN},
    "yarn, a factor": {"rope_scaling": {"rope_type": "yarn", "attention_factor": 1.5, "truncate": False} | YARN},
    "yarn, betas": {"rope_theta": 7e3, "rope_scaling": {"type": "yarn", "beta_fast": 6.0, "beta_slow": 2.0} | YARN},
}
LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 4, "head_dim": 4,
}  # fmt: skip
WINDOWS = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2}
TARGETS = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen2 with windows": WINDOWS,
    "qwen3 with windows": WINDOWS | {"attention_bias": True},
    "mistral": {"sliding_window": 5},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "deepseek_v3": LATENT,
}


class Layers(NamedTuple):
    """Numbers of a model's layers that no tensor holds."""

    frequencies: list[float]
    amplitude: float  # of cosines and sines
    scales: list[float]  # of scores, by layer
    windows: list[int | None]


def transformers_model(fields: dict[str, Any]) -> Any:
    named = {name: value for name, value in fields.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields["model_type"], **named))


def outside(model: Any) -> Layers:
    rotary, layers = model.model.rotary_emb, [layer.self_attn for layer in model.model.layers]
    shared = model.config.sliding_window if model.config.model_type == "mistral" else None
    windows = [getattr(layer, "sliding_window", shared) for layer in layers]
    return Layers(rotary.inv_freq.tolist(), rotary.attention_scaling, [layer.scaling for layer in layers], windows)


def inside(config: ModelConfig) -> Layers:
    attentions = [layer.attention for layer in config.layers]
    scales = [each.head_dim**-0.5 if isinstance(each, HeadAttention) else each.scale for each in attentions]
    frequencies = inverse_frequencies(config.rope).tolist()
    return Layers(frequencies, config.rope.amplitude, scales, list(config.sliding_windows))


def assert_equal(ours: Layers, theirs: Layers) -> None:
    assert ours.windows == theirs.windows
    for name in ("frequencies", "amplitude", "scales"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6), name


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("target", TARGETS)
def test_layers_of_targets_are_those_of_transformers(target: str, rope: str, published):
    fields = published.small(target.split()[0], **TARGETS[target] | ROPES[rope])
    theirs = transformers_model(fields)
    config = model_config(Fields(Path("config.json"), fields))
    assert_equal(inside(config), outside(theirs))
    if not config.expert_layers:
        shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
        assert target_layout(config) == shapes


def layer_tensors(theirs: Any, layout: str) -> dict[str, torch.Tensor]:
    """Tensors of a drafter with the layers of a model of transformers, random and under the names of a format."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name.removeprefix("model."): list(tensor.shape) for name, tensor in theirs.state_dict().items()}
    shapes = {name: shape for name, shape in shapes.items() if name.startswith("layers.")}
    if layout == "mtp":
        shapes = {name.replace("layers.", "modules.", 1): shape for name, shape in shapes.items()}
        shapes |= {f"modules.{index}.{name}.weight": [24] for index in range(2) for name in ("enorm", "hnorm", "norm")}
        shapes |= {f"modules.{index}.eh_proj.weight": [24, 48] for index in range(2)}
    elif layout == "eagle":
        doubled = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        shapes = {name: [shape[0], 48] if name.endswith(doubled) else shape for name, shape in shapes.items()}
        shapes |= {"layers.0.hidden_norm.weight": [24], "fc.weight": [24, 72], "norm.weight": [24]}
        shapes |= {"lm_head.weight": [40, 24]}
    else:
        shapes |= {"fc.weight": [24, 48], "hidden_norm.weight": [24], "norm.weight": [24]}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


BLOCK = {"block_size": 4, "target_hidden_size": 24}
IDS = {"target_layer_ids": [0, 2], "mask_token_id": 39}
EAGLE_IDS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "eagle_aux_hidden_state_convention": "entering"}
DRAFTERS = {  # layout, family, number of layers, fields next to those of the layers
    "z-lab": ("z-lab", "qwen3", 2, BLOCK | {"dflash_config": IDS}),
    "deepspec": ("deepspec", "llama", 2, BLOCK | IDS | {"markov_rank": 0, "num_anchors": 1}),
    "eagle": ("eagle", "llama", 1, EAGLE_IDS | {"draft_vocab_size": 40, "norm_before_residual": False}),
}


@pytest.mark.parametrize("rope", ["theta", "llama3", "yarn, both scales", "yarn, a factor"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_layers_of_drafters_are_those_of_transformers(drafter: str, biases: bool, rope: str, tmp_path: Path, published):
    """In both layouts of `convert`, the written fields of the layers are read by transformers as the original ones."""
    layout, family, num_layers, own = DRAFTERS[drafter]
    layer = published.small(family, num_hidden_layers=num_layers, attention_bias=biases, **ROPES[rope])
    layer.pop("draft_vocab_size")
    theirs = transformers_model(layer)
    target = published.small("qwen3")
    published.save(tmp_path / "target", target, {})
    first = published.save(tmp_path / "first", layer | own, layer_tensors(theirs, layout))
    for number, new in enumerate(("speculators", layout)):
        convert(tmp_path / "target", first, tmp_path / str(number), new)
    for folder in (first, tmp_path / "0", tmp_path / "1"):
        model = load_drafter(folder, model_config(Fields(Path("target"), target))).config.model
        assert_equal(inside(model), outside(theirs))
        fields = json.loads((folder / "config.json").read_text())
        written = fields.get("transformer_layer_config", fields)
        read = transformers_model({name: written[name] for name in written if name in layer})
        assert_equal(outside(read), outside(theirs))
        assert read.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("rope", ["theta", "yarn, both scales"])
@pytest.mark.parametrize("target", ["llama", "llama with biases", "qwen2", "mistral", "qwen3 with windows"])
def test_an_mtp_module_has_the_layers_of_its_target(target: str, rope: str, tmp_path: Path, published):
    """As in XiaomiMiMo/MiMo-7B, whose modules have the biases of Qwen2; its config.json names no other layer."""
    changes = TARGETS[target] | ({"max_window_layers": 0} if "windows" in target else {})
    fields = published.small(target.split()[0], **changes | ROPES[rope], num_hidden_layers=2)
    theirs = transformers_model(fields)
    tensors = layer_tensors(theirs, "mtp")
    folder = published.save(tmp_path / "modules", {"num_nextn_predict_layers": 2}, tensors)
    drafter = load_drafter(folder, model_config(Fields(Path("target"), fields)))
    assert_equal(inside(drafter.config.model), outside(theirs))
    assert {name: tensor.tolist() for name, tensor in drafter.tensors.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("layout", "name", "ids"),
    [
        ("z-lab", "target_layer_ids", [1, 9, 17, 25, 33]),  # of z-lab/Qwen3-8B-DFlash-b16: outputs of layers
        ("speculators", "aux_hidden_state_layer_ids", [2, 10, 18, 26, 34]),  # inputs (vllm-project/speculators#737)
    ],
)
def test_written_layer_ids_follow_the_published_convention(layout: str, name: str, ids: list[int]):
    """DFlash reads five of 36 layers, evenly spaced; an output of layer 1 enters layer 2."""
    layers = tiny_config("qwen3", 2)
    sizes = layers, layers.vocab_size, layers.hidden_size
    config = DFlashConfig(*sizes, feature_layers=(2, 10, 18, 26, 34), block=BlockConfig(4, 7))
    fields = head_fields(config, layout)
    assert (fields | fields.get("dflash_config", {}))[name] == ids
