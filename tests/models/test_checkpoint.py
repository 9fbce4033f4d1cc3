"""Checkpoints of every published layout, shrunk and filled at random, are loaded as written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specsim.core.errors import InputError
from specsim.models.checkpoint import load_drafter, load_target
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.layout import target_layout
from specsim.models.checkpoint.model_config import model_config, read_target_config
from specsim.models.drafters import eagle, eagle3

TARGETS = ("llama-3.1-8b-instruct", "qwen3-8b")
EAGLE = "eagle-llama2-chat-7b"
EAGLE3 = "eagle3-llama3.1-instruct-8b"
SPECULATORS = "eagle3-llama3.1-8b-speculators"
HEADS = (EAGLE, EAGLE3, SPECULATORS)
SPECFORGE = ("eagle3-qwen3-32b-specforge", "eagle3.1-qwen3-30b-specforge")
SPECULATORS_31 = "eagle3.1-qwen3-235b-speculators"
EVERY_HEAD = (*HEADS, *SPECFORGE, SPECULATORS_31)
ENTERING = {"eagle_aux_hidden_state_convention": "entering"}
FORMS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
Tensors = dict[str, torch.Tensor]


def canonical(name: str, tensors: Tensors) -> Tensors:
    return {
        key.replace("layers.0.", "midlayer.") if name.endswith("speculators") else key: t for key, t in tensors.items()
    }


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


# Published layouts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TARGETS)
def test_targets_load_in_every_form(name: str, form: str, tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, name, form)
    assert_same(load_target(folder).tensors, tensors)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HEADS)
def test_heads_load_in_every_form(name: str, form: str, tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, name, form)
    assert_same(load_drafter(folder, published.target()).tensors, canonical(name, tensors))


@pytest.mark.parametrize("name", TARGETS)
def test_target_layout_is_the_published_one_at_full_size(name: str, published):
    manifest = published.manifests[name]
    shapes = {key: tuple(entry["shape"]) for key, entry in manifest["tensors"].items()}
    assert target_layout(model_config(Fields(Path(name), manifest["config"]))) == shapes


@pytest.mark.parametrize("name", EVERY_HEAD)
def test_head_layout_is_the_published_one_at_full_size(name: str, published):
    manifest = published.manifests[name]
    layer = manifest["config"].get("transformer_layer_config", manifest["config"])
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    widths = {field: layer[field] for field in names if field in layer}
    of_target = published.manifests["llama-3.1-8b-instruct"]["config"] | widths
    target = model_config(Fields(Path(name), of_target | {"num_hidden_layers": 94}))
    fields = Fields(Path(name), manifest["config"] | ENTERING)
    required, optional = drafter_layout((eagle if name == EAGLE else eagle3).read_config(fields, target))
    shapes = {key: tuple(entry["shape"]) for key, entry in canonical(name, manifest["tensors"]).items()}
    assert required.items() <= shapes.items() <= (required | optional).items()


def test_llama_config(tmp_path: Path, published):
    folder, _ = published.write(tmp_path, TARGETS[0])
    config = load_target(folder).config
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert config.rope.theta == 500000.0
    assert config.rope.scaling == {"rope_type": "llama3", "original_max_position_embeddings": 8192} | factors
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 2, 6)
    assert set(config.sliding_windows) == {None}


def test_end_tokens_come_from_generation_config_first(tmp_path: Path, published):
    folder, _ = published.write(tmp_path, "qwen3-8b")
    assert read_target_config(folder).eos_token_ids == (151645,)
    (folder / "generation_config.json").write_text(json.dumps(published.manifests["qwen3-8b"]["generation_config"]))
    assert read_target_config(folder).eos_token_ids == (151645, 151643)
    (folder / "generation_config.json").write_text("{}")
    assert read_target_config(folder).eos_token_ids == (151645,)


def test_head_configs(tmp_path: Path, published):
    target = published.target()
    eagle, eagle3, speculators = (
        load_drafter(published.write(tmp_path / name, name)[0], target).config for name in HEADS
    )
    assert (eagle.kind, eagle.feature_layers, eagle.draft_vocab_size) == ("eagle", (), 40)
    assert (eagle3.kind, eagle3.feature_layers, eagle3.draft_vocab_size) == ("eagle3", (2, 18, 33), 14)
    assert (speculators.kind, speculators.target_hidden_size) == ("eagle3", 24)
    assert not eagle3.norm_before_residual
    # The head was trained with RoPE's default base, though its target has another.
    assert (eagle3.model.rope.theta, target.rope.theta) == (10000.0, 5e5)
    # These heads have their own RMSNorm epsilon; other missing fields are the target's.
    assert (eagle.model.rms_norm_eps, eagle3.model.rms_norm_eps) == (1e-6, 1e-5)


@pytest.mark.parametrize("name", [*SPECFORGE, SPECULATORS_31])
def test_specforge_and_eagle3_1_heads_load(name: str, tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, name)
    head = load_drafter(folder, published.target(94), ENTERING if name == SPECULATORS_31 else None)
    assert_same(head.tensors, canonical(name, tensors))
    flags = (head.config.norm_before_fc, head.config.fc_norm, head.config.norm_output)
    assert (
        flags
        == {SPECFORGE[0]: (False,) * 3, SPECFORGE[1]: (False, True, True), SPECULATORS_31: (True, False, True)}[name]
    )
    layers = (2, 46, 91, 93) if name == SPECULATORS_31 else (2, 47, 91)
    assert (head.config.feature_layers, head.config.kind) == (layers, "eagle3")
    assert head.config.model.sliding_windows == ((2048,) if name == SPECULATORS_31 else (None,))


# Variations of layout


def test_prefixes(tmp_path: Path, published):
    target, tensors = published.write(tmp_path / "target", TARGETS[0])
    bare = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    published.save(target, json.loads((target / "config.json").read_text()), bare)
    assert_same(load_target(target).tensors, tensors)
    for name in HEADS:
        head, tensors = published.write(tmp_path / name, name)
        prefixed = {f"model.{key}": tensor for key, tensor in tensors.items()}
        published.save(head, json.loads((head / "config.json").read_text()), prefixed)
        assert_same(load_drafter(head, published.target()).tensors, canonical(name, tensors))


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_head_is_the_embedding(stored: bool, tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, "qwen3-8b", tie_word_embeddings=True)
    del tensors["lm_head.weight"]
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()} if stored else {}
    save_file(tensors | head, folder / FORMS[0])
    loaded = load_target(folder).tensors
    assert loaded["lm_head.weight"] is loaded["model.embed_tokens.weight"]
    assert torch.equal(loaded["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path: Path, published):
    """Other programs would read it as stored."""
    folder, _ = published.write(tmp_path, "qwen3-8b", tie_word_embeddings=True)
    with pytest.raises(InputError, check=lambda error: error.name == f"lm_head.weight in {folder}"):
        load_target(folder)


def test_rotary_tables_are_passed_over(tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, TARGETS[0])
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}, folder / FORMS[0])
    assert_same(load_target(folder).tensors, tensors)


def test_biases_of_a_target(tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, TARGETS[0], attention_bias=True, mlp_bias=True)
    linears = [key for key in tensors if "_proj" in key]
    tensors |= {key.replace("weight", "bias"): tensors[key][:, 0].clone() for key in linears}
    save_file(tensors, folder / FORMS[0])
    assert_same(load_target(folder).tensors, tensors)


@pytest.mark.parametrize(("bias", "stored"), [(None, True), (None, False), (True, True), (False, False)])
def test_bias_of_eagle_fc(bias: bool | None, stored: bool, tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, EAGLE, bias=bias)
    if not stored:
        del tensors["fc.bias"]
        save_file(tensors, folder / FORMS[0])
    assert_same(load_drafter(folder, published.target()).tensors, tensors)


def test_an_eagle_head_of_two_layers(tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, EAGLE, num_hidden_layers=2)
    first = {key: tensor for key, tensor in tensors.items() if key.startswith("layers.0.")}
    tensors |= {key.replace("layers.0", "layers.1"): tensor.clone() for key, tensor in first.items()}
    tensors["layers.1.input_layernorm.weight"] = torch.ones(24)
    save_file(tensors, folder / FORMS[0])
    head = load_drafter(folder, published.target())
    assert_same(head.tensors, tensors)
    assert head.config.model.kv_layout.num_layers == 2


def test_a_head_of_equal_vocabularies_has_no_tables(tmp_path: Path, published):
    config = published.config(EAGLE3) | {"draft_vocab_size": None}
    tensors = published.tensors(EAGLE3)
    del tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = torch.ones(40, 24)
    head = load_drafter(published.save(tmp_path, config, tensors), published.target())
    assert_same(head.tensors, tensors)
    assert head.config.draft_vocab_size == 40
    save_file(tensors | {"t2d": torch.ones(40, dtype=torch.bool)}, tmp_path / FORMS[0])
    with pytest.raises(InputError, check=lambda error: error.name == f"d2t in {tmp_path}"):
        load_drafter(tmp_path, published.target())


def test_t2d_is_made_from_d2t(tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, EAGLE3)
    save_file({key: tensor for key, tensor in tensors.items() if key != "t2d"}, folder / FORMS[0])
    assert_same(load_drafter(folder, published.target()).tensors, tensors)


def test_a_head_narrower_than_its_target_has_its_own_embedding(tmp_path: Path, published):
    config = published.config(EAGLE3) | {"hidden_size": 12, "head_dim": 6, "target_hidden_size": 24}
    target = published.target()
    required, _ = drafter_layout(eagle3.read_config(Fields(tmp_path, config), target))
    assert required["embed_tokens.weight"] == (40, 12)
    assert required["fc.weight"] == (12, 72)
    tensors = {key: torch.ones(shape) for key, shape in required.items()} | published.vocabulary()
    assert_same(load_drafter(published.save(tmp_path, config, tensors), target).tensors, tensors)


def test_fields_a_head_omits_are_its_targets(tmp_path: Path, published):
    named = ("model_type", "num_hidden_layers", "draft_vocab_size")
    config = {name: published.config(EAGLE3)[name] for name in named}
    folder = published.save(tmp_path, config, published.tensors(EAGLE3))
    target = published.target()
    model = load_drafter(folder, target).config.model
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "rms_norm_eps"):
        assert getattr(model, name) == getattr(target, name)


def test_safetensors_come_before_pickles(tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, EAGLE3)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    assert_same(load_drafter(folder, published.target()).tensors, tensors)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_own_checkpoints(family: str, tied: bool, tmp_path: Path, published):
    """Checkpoints that transformers 5 writes are read with the shape and the tensors of its model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    windows = {} if family == "llama" else {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3}
    fields = {name: value for name, value in published.small(family, **windows).items() if name != "model_type"}
    rope = {"rope_type": "default", "rope_theta": 12345.0}
    config = AutoConfig.for_model(family, **fields, rope_parameters=rope, tie_word_embeddings=tied, eos_token_id=[7, 8])
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path)
    assert_same(target.tensors, dict(model.state_dict()))
    assert (target.config.rope.theta, target.config.rope.scaling, target.config.eos_token_ids) == (12345.0, {}, (7, 8))
    expected = {"llama": (None,) * 4, "qwen3": (None, None, None, 5), "mistral": (5, 5, 5, 5)}[family]
    assert target.config.sliding_windows == expected


def test_a_tied_head_is_counted_once(tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, "qwen3-8b", tie_word_embeddings=True)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / FORMS[0])
    parameters = sum(tensor.numel() for tensor in tensors.values()) - 40 * 24
    assert f"parameters {parameters:,}" in repr(load_target(folder))


def test_loading_imports_no_heavy_library(tmp_path: Path, published):
    folder, _ = published.write(tmp_path, TARGETS[0])
    code = (
        "import sys, specsim.models.checkpoint as c; c.load_target(sys.argv[1]); "
        "print([m for m in ('transformers', 'triton', 'huggingface_hub', 'specsim.reference') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
