import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError
from specsim.core.target import DenseMLP
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.checkpoint.layout import target_layout
from specsim.models.shapes import NAMES, Shape, random_pair, shape
from specsim.models.tiny_config import tiny_config
from specsim.serving.generation import generate

MANIFESTS = Path(__file__).parent / "manifests"
# Parameters of the published checkpoints, counting each tensor once.
PARAMETERS = {
    "gpt-oss-20b": 20_914_757_184,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}


def num_parameters(config) -> int:
    layout = target_layout(config)
    if config.tie_word_embeddings:
        del layout["lm_head.weight"]
    return sum(torch.Size(size).numel() for size in layout.values())


def tiny(**changes) -> Shape:
    return Shape("tiny", tiny_config(**changes))


def test_shapes_have_the_parameters_of_the_published_checkpoints():
    assert {name: num_parameters(shape(name).config) for name in NAMES} == PARAMETERS


@pytest.mark.parametrize(("name", "manifest"), [("llama-3.1-8b", "llama-3.1-8b-instruct"), ("qwen3-8b", "qwen3-8b")])
def test_shape_is_that_of_the_published_config(name, manifest, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((MANIFESTS / f"{manifest}.json").read_text())["config"])
    )
    assert shape(name).config == shape(tmp_path).config == shape(tmp_path / "config.json").config


@pytest.mark.parametrize("name", NAMES)
def test_config_names_the_source_of_its_numbers(name):
    path = Path(inspect.getfile(inspect.unwrap(shape))).parent / "shape_configs" / f"{name}.json"
    assert json.loads(path.read_text())["source"].startswith("https://huggingface.co/")


def test_slice_is_one_gpus_share():
    whole = shape("llama-2-70b").config
    part = shape("llama-2-70b-tp8-slice")
    heads = whole.with_heads(num_heads=8, num_kv_heads=1)
    layers = tuple(replace(layer, mlp=DenseMLP(3584)) for layer in heads.layers)
    assert part == Shape("llama-2-70b-tp8-slice", replace(whole, layers=layers, vocab_size=4000), tensor_parallel=8)
    assert part.config.head_dim == 128
    assert shape("llama-2-70b-tp1-slice").config == whole
    # One GPU's tensors as in Meta's own files: eight of 8.6 billion, with all norms in each.
    assert round(num_parameters(part.config) / 1e9, 1) == 8.6


def test_kv_heads_are_copied_where_gpus_outnumber_them():
    assert shape("llama-3-8b-tp16-slice").config.num_kv_heads == 1


@pytest.mark.parametrize("name", ["llama-3-8b-tp3-slice", "llama-3-8b-tp64-slice", "qwen3-4b-tp64-slice"])
def test_slice_has_to_divide(name):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("shape", name)):
        shape(name)


@pytest.mark.parametrize(
    "name", ["llama-9", "llama-3-8b-tp0-slice", "llama-3-8b-tp2", "-tp2-slice", "x\0y", "a" * 5000]
)
def test_an_unknown_shape_error_lists_the_known_ones(name):
    with pytest.raises(InputError) as caught:
        shape(name)
    assert (caught.value.name, caught.value.value) == ("shape", name)
    assert "qwen3-8b" in caught.value.allowed


def test_bad_configs_raise_the_errors_of_checkpoints(tmp_path):
    with pytest.raises(InputError, check=lambda error: error.name == str(tmp_path / "config.json")):
        shape(tmp_path)
    file = tmp_path / "shape.json"
    file.write_text("{")
    with pytest.raises(InputError, check=lambda error: error.name == str(file)):
        shape(file)
    file.write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, check=lambda error: error.name == f"num_hidden_layers in {file}"):
        shape(file)


def test_slice_of_a_config_on_disk(tmp_path):
    fields = json.loads((MANIFESTS / "qwen3-8b.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert shape(f"{tmp_path}-tp2-slice").config == shape("qwen3-8b-tp2-slice").config


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("drafter", ["eagle3", "eagle"])
def test_random_pair_has_every_tensor_of_its_shape(family, drafter, device):
    pair = random_pair(tiny(family=family, num_layers=3), device, torch.float32, drafter)
    required, optional = drafter_layout(pair.drafter.config)
    for tensors, layout in ((pair.target.tensors, target_layout(pair.target.config)), (pair.drafter.tensors, required)):
        assert layout.items() <= {name: tuple(tensor.shape) for name, tensor in tensors.items()}.items()
    assert set(pair.drafter.tensors) <= set(required) | set(optional)
    for tensors in (pair.target.tensors, pair.drafter.tensors):
        for name, tensor in tensors.items():
            assert tensor.device.type == device, name
            assert tensor.is_floating_point() is False or tensor.isfinite().all(), name
    assert pair.name == f"random weights of tiny, {drafter}"


def test_random_pair_is_the_same_for_the_same_seed():
    first, again, other = (random_pair(tiny(num_layers=3), seed=seed).target.tensors for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert first["lm_head.weight"].dtype == torch.bfloat16


def test_tied_head_is_the_embedding():
    tensors = random_pair(tiny(tie_word_embeddings=True), drafter=None).target.tensors
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]


def test_draft_ids_are_different_target_ids_in_order():
    tensors = random_pair(replace(tiny(num_layers=3), tensor_parallel=32000 // 17)).drafter.tensors
    target_ids = tensors["d2t"] + torch.arange(17)
    assert (target_ids.diff() > 0).all()
    assert target_ids[0] == 0
    assert target_ids[-1] < 48
    assert torch.equal(tensors["t2d"].nonzero().flatten(), target_ids)


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(3, (0, 1, 2)), (4, (0, 2, 3)), (6, (0, 3, 5)), (7, (2, 3, 4)), (32, (2, 16, 29))]
)
def test_feature_layers_are_published_ones_from_seven_layers(num_layers, layers):
    assert random_pair(tiny(num_layers=num_layers)).drafter.config.feature_layers == layers


@pytest.mark.parametrize("drafter", ["eagle3", "medusa"])  # EAGLE-3 needs three layers
def test_other_drafters_are_refused(drafter):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("drafter", drafter)):
        random_pair(tiny(), drafter=drafter)


def test_slice_has_its_share_of_the_drafts():
    part = replace(tiny(num_layers=3), tensor_parallel=1000)
    assert random_pair(part).drafter.config.draft_vocab_size == 32


@pytest.mark.parametrize("drafter", ["eagle3", "eagle", None])
def test_random_pair_runs_from_token_ids_and_reads_no_text(drafter):
    pair = random_pair(tiny(num_layers=3), dtype=torch.float32, drafter=drafter)
    config = SpecConfig.plain() if drafter is None else SpecConfig(topk=2, num_steps=2, num_draft_tokens=4)
    generation = generate(pair, [[1, 2, 3]], config, SamplingParams(max_new_tokens=6))
    assert len(generation.outputs[0].token_ids) == 6
    assert generation.outputs[0].text == ""
    with pytest.raises(InputError, check=lambda error: "no tokenizer" in error.allowed):
        generate(pair, "text", config)


def test_drafts_are_as_sure_as_a_trained_heads():
    """The best of 32000 drafts has 0.7 in the mean, so that trees reach their last level."""
    head = random_pair(tiny(num_layers=3, vocab_size=32000)).drafter.tensors["lm_head.weight"].float()
    hidden = torch.nn.functional.rms_norm(torch.randn(200, 32), (32,))
    assert 0.6 < (hidden @ head.T).softmax(-1).amax(-1).mean() < 0.8
