"""Checkpoints of every published layout, shrunk and filled at random, are loaded as written; broken ones are named."""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specsim.core.errors import InputError
from specsim.core.pair import Pair
from specsim.models.checkpoint import load_drafter, load_target, locate
from specsim.models.checkpoint.drafter_config import drafter_config
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.layout import drafter_layout, target_layout
from specsim.models.checkpoint.model_config import model_config, read_target_config
from specsim.models.load import load

MANIFESTS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "manifests").glob("*.json")}
TARGETS = ("llama-3.1-8b-instruct", "qwen3-8b")
EAGLE, EAGLE3, SPECULATORS = "eagle-llama2-chat-7b", "eagle3-llama3.1-instruct-8b", "eagle3-llama3.1-8b-speculators"
HEADS = (EAGLE, EAGLE3, SPECULATORS)
FORMS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I64": torch.int64, "BOOL": torch.bool}
# num_attention_heads to head_dim: 4 heads of 6, hidden 24; the rest in proportion.
TINY = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "head_dim": 6,
    "draft_vocab_size": 14,
}

Tensors = dict[str, torch.Tensor]


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """A config with tiny sizes; everything else as published. KV heads keep their share of the heads."""
    tiny = {name: TINY.get(name, value) if value is not None else None for name, value in config.items()}
    if "num_key_value_heads" in config:
        grouped = config["num_key_value_heads"] < config["num_attention_heads"]
        tiny["num_key_value_heads"] = 2 if grouped else TINY["num_attention_heads"]
    if "transformer_layer_config" in config:
        tiny["transformer_layer_config"] = shrink(config["transformer_layer_config"])
    return tiny


def dimensions(config: dict[str, Any]) -> list[int]:
    """Every size that a shape of this config's checkpoint can have, in a fixed order."""
    config = config | config.get("transformer_layer_config", {})
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads", heads) * head_dim
    fused = [2 * hidden, 3 * hidden] if config["num_hidden_layers"] == 1 else []
    sizes = [config["vocab_size"], config["intermediate_size"], hidden, heads * head_dim, kv, head_dim, *fused]
    return [*sizes, config.get("draft_vocab_size", config["vocab_size"])]


def random_tensors(manifest: dict[str, Any], seed: int = 0) -> Tensors:
    """Random tensors under the manifest's keys, in its types, every dimension replaced by its tiny counterpart."""
    generator = torch.Generator().manual_seed(seed)
    to_tiny: dict[int, int] = {}
    for size, tiny in zip(dimensions(manifest["config"]), dimensions(shrink(manifest["config"])), strict=True):
        assert to_tiny.setdefault(size, tiny) == tiny
    tensors = {}
    for key, entry in manifest["tensors"].items():
        shape = [to_tiny[size] for size in entry["shape"]]
        tensors[key] = torch.randn(shape, generator=generator).to(DTYPES[entry["dtype"]])
    return tensors | (vocabulary() if "d2t" in tensors else {})


def vocabulary() -> Tensors:
    """Draft ids 0..13 are the target ids 3, 5, 7, ..."""
    ids = torch.arange(TINY["draft_vocab_size"]) * 2 + 3
    t2d = torch.zeros(TINY["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def save(tensors: Tensors, file: Path) -> None:
    if file.suffix == ".safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file)


def write(folder: Path, config: dict[str, Any], tensors: Tensors, form: str = FORMS[0], shards: int = 3) -> Path:
    """A checkpoint folder in one of the four forms."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not form.endswith(".index.json"):
        save(tensors, folder / form)
        return folder
    stem, suffix = form.removesuffix(".index.json").rsplit(".", 1)
    weight_map = {}
    for shard in range(shards):
        part = dict(list(tensors.items())[shard::shards])
        name = f"{stem}-{shard + 1:05d}-of-{shards:05d}.{suffix}"
        save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / form).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_manifest(folder: Path, name: str, form: str = FORMS[0], **changes: Any) -> tuple[Path, Tensors]:
    """A manifest's checkpoint, shrunk; changes: fields of its config."""
    manifest = MANIFESTS[name]
    tensors = random_tensors(manifest)
    return write(folder, shrink(manifest["config"]) | changes, tensors, form), tensors


def target_of(name: str) -> Any:
    """The tiny config of a target that the named head fits: 36 layers of hidden 24."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "llama", "rms_norm_eps": 1e-5}
    layers = {"num_hidden_layers": 36, "max_position_embeddings": 99, "rope_theta": 5e5}
    return model_config(Fields(Path(name), TINY | heads | layers))


def canonical(name: str, tensors: Tensors) -> Tensors:
    return {key.replace("layers.0.", "midlayer.") if name == SPECULATORS else key: t for key, t in tensors.items()}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


# Published layouts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TARGETS)
def test_targets_load_in_every_form(name: str, form: str, tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, name, form)
    assert_same(load_target(folder).tensors, tensors)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HEADS)
def test_heads_load_in_every_form(name: str, form: str, tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, name, form)
    assert_same(load_drafter(folder, target_of(name)).tensors, canonical(name, tensors))


@pytest.mark.parametrize("name", TARGETS)
def test_target_layout_is_the_published_one_at_full_size(name: str):
    manifest = MANIFESTS[name]
    shapes = {key: tuple(entry["shape"]) for key, entry in manifest["tensors"].items()}
    assert target_layout(model_config(Fields(Path(name), manifest["config"]))) == shapes


@pytest.mark.parametrize(("name", "kind"), [(EAGLE, "eagle"), (EAGLE3, "eagle3"), (SPECULATORS, "eagle3")])
def test_head_layout_is_the_published_one_at_full_size(name: str, kind: str):
    manifest = MANIFESTS[name]
    of_target = MANIFESTS["llama-3.1-8b-instruct"]["config"] | (manifest["config"] if kind == "eagle" else {})
    target = model_config(Fields(Path(name), of_target | {"num_hidden_layers": 32}))
    required, optional = drafter_layout(drafter_config(Fields(Path(name), manifest["config"]), kind, target))
    shapes = {key: tuple(entry["shape"]) for key, entry in canonical(name, manifest["tensors"]).items()}
    assert required.items() <= shapes.items() <= (required | optional).items()


def test_llama_config(tmp_path: Path):
    folder, _ = write_manifest(tmp_path, TARGETS[0])
    config = load_target(folder).config
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == {"rope_type": "llama3", "original_max_position_embeddings": 8192} | factors
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 2, 6)
    assert config.sliding_windows == ()


def test_end_tokens_come_from_generation_config_first(tmp_path: Path):
    folder, _ = write_manifest(tmp_path, "qwen3-8b")
    assert read_target_config(folder).eos_token_ids == (151645,)
    (folder / "generation_config.json").write_text(json.dumps(MANIFESTS["qwen3-8b"]["generation_config"]))
    assert read_target_config(folder).eos_token_ids == (151645, 151643)
    (folder / "generation_config.json").write_text("{}")
    assert read_target_config(folder).eos_token_ids == (151645,)


def test_head_configs(tmp_path: Path):
    target = target_of("")
    eagle, eagle3, speculators = (
        load_drafter(write_manifest(tmp_path / name, name)[0], target).config for name in HEADS
    )
    assert (eagle.kind, eagle.feature_layers, eagle.draft_vocab_size) == ("eagle", (), 40)
    assert (eagle3.kind, eagle3.feature_layers, eagle3.draft_vocab_size) == ("eagle3", (2, 18, 33), 14)
    assert (speculators.kind, speculators.target_hidden_size) == ("eagle3", 24)
    assert not eagle3.norm_before_residual
    # The head was trained with RoPE's default base, though its target has another.
    assert (eagle3.model.rope_theta, target.rope_theta) == (10000.0, 5e5)
    # These heads have their own RMSNorm epsilon; a field that is not there is the target's.
    assert (eagle.model.rms_norm_eps, eagle3.model.rms_norm_eps) == (1e-6, 1e-5)


# Variations of layout


def test_prefixes(tmp_path: Path):
    target, tensors = write_manifest(tmp_path / "target", TARGETS[0])
    bare = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    write(target, json.loads((target / "config.json").read_text()), bare)
    assert_same(load_target(target).tensors, tensors)
    for name in HEADS:
        head, tensors = write_manifest(tmp_path / name, name)
        write(
            head,
            json.loads((head / "config.json").read_text()),
            {f"model.{key}": tensor for key, tensor in tensors.items()},
        )
        assert_same(load_drafter(head, target_of(name)).tensors, canonical(name, tensors))


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_head_is_the_embedding(stored: bool, tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, "qwen3-8b", tie_word_embeddings=True)
    del tensors["lm_head.weight"]
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()} if stored else {}
    save_file(tensors | head, folder / FORMS[0])
    loaded = load_target(folder).tensors
    assert loaded["lm_head.weight"] is loaded["model.embed_tokens.weight"]
    assert torch.equal(loaded["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path: Path):
    """Others would read it as it stands."""
    folder, _ = write_manifest(tmp_path, "qwen3-8b", tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"lm_head.weight in .* is 'another tensor'; allowed: the embedding, or none"):
        load_target(folder)


def test_rotary_tables_are_passed_over(tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, TARGETS[0])
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}, folder / FORMS[0])
    assert_same(load_target(folder).tensors, tensors)


def test_biases_of_a_target(tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, TARGETS[0], attention_bias=True, mlp_bias=True)
    linears = [key for key in tensors if "_proj" in key]
    tensors |= {key.replace("weight", "bias"): tensors[key][:, 0].clone() for key in linears}
    save_file(tensors, folder / FORMS[0])
    assert_same(load_target(folder).tensors, tensors)


@pytest.mark.parametrize(("bias", "stored"), [(None, True), (None, False), (True, True), (False, False)])
def test_bias_of_eagle_fc(bias: bool | None, stored: bool, tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, EAGLE, bias=bias)
    if not stored:
        del tensors["fc.bias"]
        save_file(tensors, folder / FORMS[0])
    assert_same(load_drafter(folder, target_of(EAGLE)).tensors, tensors)


def test_an_eagle_head_of_two_layers(tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, EAGLE, num_hidden_layers=2)
    first = {key: tensor for key, tensor in tensors.items() if key.startswith("layers.0.")}
    tensors |= {key.replace("layers.0", "layers.1"): tensor.clone() for key, tensor in first.items()}
    tensors["layers.1.input_layernorm.weight"] = torch.ones(24)
    save_file(tensors, folder / FORMS[0])
    head = load_drafter(folder, target_of(EAGLE))
    assert_same(head.tensors, tensors)
    assert head.config.model.kv_layout.num_layers == 2


def test_a_head_of_equal_vocabularies_has_no_tables(tmp_path: Path):
    config = shrink(MANIFESTS[EAGLE3]["config"]) | {"draft_vocab_size": None}
    tensors = random_tensors(MANIFESTS[EAGLE3])
    del tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = torch.ones(40, 24)
    head = load_drafter(write(tmp_path, config, tensors), target_of(EAGLE3))
    assert_same(head.tensors, tensors)
    assert head.config.draft_vocab_size == 40
    save_file(tensors | {"t2d": torch.ones(40, dtype=torch.bool)}, tmp_path / FORMS[0])
    with pytest.raises(InputError, match=r"d2t in .* is 'missing'; allowed: a table of offsets, where there is a t2d"):
        load_drafter(tmp_path, target_of(EAGLE3))


def test_t2d_is_made_from_d2t(tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, EAGLE3)
    save_file({key: tensor for key, tensor in tensors.items() if key != "t2d"}, folder / FORMS[0])
    assert_same(load_drafter(folder, target_of(EAGLE3)).tensors, tensors)


def test_a_head_narrower_than_its_target_has_its_own_embedding(tmp_path: Path):
    config = shrink(MANIFESTS[EAGLE3]["config"]) | {"hidden_size": 12, "head_dim": 6, "target_hidden_size": 24}
    target = target_of(EAGLE3)
    required, _ = drafter_layout(drafter_config(Fields(tmp_path, config), "eagle3", target))
    assert required["embed_tokens.weight"] == (40, 12)
    assert required["fc.weight"] == (12, 72)
    tensors = {key: torch.ones(shape) for key, shape in required.items()} | vocabulary()
    assert_same(load_drafter(write(tmp_path, config, tensors), target).tensors, tensors)


def test_fields_a_head_leaves_out_are_its_targets(tmp_path: Path):
    named = ("model_type", "num_hidden_layers", "draft_vocab_size")
    config = {name: shrink(MANIFESTS[EAGLE3]["config"])[name] for name in named}
    folder = write(tmp_path, config, random_tensors(MANIFESTS[EAGLE3]))
    model, target = load_drafter(folder, target_of(EAGLE3)).config.model, target_of(EAGLE3)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "rms_norm_eps"):
        assert getattr(model, name) == getattr(target, name)


def test_safetensors_come_before_pickles(tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, EAGLE3)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    assert_same(load_drafter(folder, target_of(EAGLE3)).tensors, tensors)


# config.json


def small(family: str, **fields: Any) -> dict[str, Any]:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "max_position_embeddings": 64}
    return TINY | heads | {"model_type": family, "rms_norm_eps": 1e-6} | fields


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_own_checkpoints(family: str, tied: bool, tmp_path: Path):
    """What transformers 5 writes is read with the shape and the tensors of its model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    windows = {} if family == "llama" else {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3}
    fields = {name: value for name, value in small(family, **windows).items() if name != "model_type"}
    rope = {"rope_type": "default", "rope_theta": 12345.0}
    config = AutoConfig.for_model(family, **fields, rope_parameters=rope, tie_word_embeddings=tied, eos_token_id=[7, 8])
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path)
    assert_same(target.tensors, dict(model.state_dict()))
    assert (target.config.rope_theta, target.config.rope_scaling, target.config.eos_token_ids) == (12345.0, {}, (7, 8))
    expected = {"llama": (), "qwen3": (None, None, None, 5), "mistral": (5, 5, 5, 5)}[family]
    assert target.config.sliding_windows == expected


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 10000.0, {}),
        ({"rope_theta": 500000, "rope_scaling": None}, 500000.0, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, 5.0, {}),
        ({"rope_theta": 5.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5.0, LLAMA3),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "llama3", **LLAMA3}}, 5.0, LLAMA3),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5.0, **LLAMA3}}, 5.0, LLAMA3),
        (
            {
                "rope_theta": 5.0,
                "rope_scaling": {"type": "llama3", **LLAMA3},
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5.0, **LLAMA3},
            },
            5.0,
            LLAMA3,
        ),
    ],
)
def test_rope_spellings(fields: dict[str, Any], theta: float, scaling: dict[str, float]):
    config = model_config(Fields(Path("config.json"), small("llama", **fields)))
    assert config.rope_theta == theta
    assert config.rope_scaling == ({"rope_type": "llama3"} | scaling if scaling else {})


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("llama", {"sliding_window": 5}, ()),
        ("mistral", {"sliding_window": 5}, (5, 5, 5, 5)),
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": 5, "layer_types": ["full_attention"] * 4}, ()),
        (
            "mistral",
            {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (5, None, 5, None),
        ),
        ("qwen3", {"sliding_window": 5, "max_window_layers": 2}, ()),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}, ()),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
            (None, None, 5, 5),
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (5, None, 5, None),
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"] * 4}, ()),
    ],
)
def test_sliding_windows(family: str, fields: dict[str, Any], expected: tuple):
    assert model_config(Fields(Path("config.json"), small(family, **fields))).sliding_windows == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_key_value_heads": None}, (4, 6)),
        ({"head_dim": None}, (2, 6)),
        ({"head_dim": 8}, (2, 8)),
    ],
)
def test_heads_not_given(fields: dict[str, Any], expected: tuple[int, int]):
    config = model_config(Fields(Path("config.json"), small("llama", **fields)))
    assert (config.num_kv_heads, config.head_dim) == expected


IDS, CONVENTION = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_convention"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (2, 18, 33)),
        ({IDS: None}, (2, 18, 33)),
        ({IDS: [1, 4, 35], CONVENTION: "entering"}, (1, 4, 35)),
        ({IDS: [0, 17, 34], CONVENTION: "output"}, (1, 18, 35)),
        ({"eagle_config": {IDS: [1, 17, 32], CONVENTION: "output", "use_aux_hidden_state": True}}, (2, 18, 33)),
    ],
)
def test_feature_layers(fields: dict[str, Any], expected: tuple[int, ...]):
    config = Fields(Path("config.json"), shrink(MANIFESTS[EAGLE3]["config"]) | fields)
    assert drafter_config(config, "eagle3", target_of(EAGLE3)).feature_layers == expected


@pytest.mark.parametrize("value", [True, False])
def test_norm_before_residual(value: bool):
    for name in (EAGLE3, SPECULATORS):
        config = Fields(Path("config.json"), shrink(MANIFESTS[name]["config"]) | {"norm_before_residual": value})
        assert drafter_config(config, "eagle3", target_of(name)).norm_before_residual is value


# What is refused, and how it is told


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt2", {}, "model_type in config.json is 'gpt2'; allowed: llama or qwen3 or mistral"),
        ("llama", {"model_type": None}, "model_type in config.json is 'missing'; allowed: llama or qwen3 or mistral"),
        ("llama", {"hidden_size": None}, "hidden_size in config.json is 'missing'; allowed: an integer of at least 1"),
        ("llama", {"vocab_size": "40"}, "vocab_size in config.json is '40'; allowed: an integer of at least 1"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers in config.json is 0; allowed: an integer of at least 1"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps in config.json is -1; allowed: a positive number"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps in config.json is 'missing'; allowed: a positive number"),
        ("llama", {"attention_bias": 1}, "attention_bias in config.json is 1; allowed: true or false"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'; allowed: silu"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3; allowed: a divisor of num_attention_heads, 4"),
        ("llama", {"head_dim": 5}, "head_dim in config.json is 5; allowed: an even number: RoPE turns pairs"),
        (
            "llama",
            {"head_dim": None, "num_attention_heads": 5},
            "num_attention_heads in config.json is 5; allowed: a divisor of hidden_size, 24",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type in config.json is 'yarn'; allowed: default or llama3",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope_type in config.json is 'linear'; allowed: default or llama3",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": {"type": "yarn"}},
            "rope_type in config.json is 'yarn'; allowed: default or llama3",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            "allowed: what rope_parameters says, rope_theta included, where both are given",
        ),
        ("llama", {"rope_scaling": "x"}, "rope_scaling in config.json is 'x'; allowed: an object"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "low_freq_factor in config.json is 'missing'; allowed: a positive number",
        ),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "allowed: one setting for all layers",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor in config.json is 0.5; allowed: 1",
        ),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config in config.json is"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id in config.json is '</s>'; allowed: an integer, a list"),
        (
            "qwen3",
            {"layer_types": ["full_attention"]},
            "layer_types in config.json is ['full_attention']; allowed: 4 times full_attention or sliding_attention",
        ),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 4},
            "use_sliding_window in config.json is 'missing'; allowed: true, with a sliding_window",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": -1},
            "max_window_layers in config.json is -1; allowed: an integer of at least 0",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window in config.json is 0; allowed: an integer of at least 1"),
    ],
)
def test_configs_of_targets_refused(family: str, fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(small(family) | fields))
    with pytest.raises(InputError) as told:
        read_target_config(Path())
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (EAGLE, {"model_type": "qwen2"}, "model_type in config.json is 'qwen2'; allowed: llama"),
        (EAGLE, {"hidden_size": 32}, "hidden_size in config.json is 32; allowed: 24, the target's hidden_size"),
        (EAGLE, {"vocab_size": 41}, "vocab_size in config.json is 41; allowed: 40, the target's"),
        (EAGLE3, {"vocab_size": 41}, "vocab_size in config.json is 41; allowed: 40, the target's"),
        (EAGLE3, {"hidden_size": 32}, "hidden_size in config.json is 32; allowed: 24, the target's hidden_size"),
        (
            EAGLE3,
            {"target_hidden_size": 28},
            "target_hidden_size in config.json is 28; allowed: 24, the target's hidden_size",
        ),
        (EAGLE3, {"draft_vocab_size": 41}, "draft_vocab_size in config.json is 41; allowed: at most 40"),
        (EAGLE3, {"num_hidden_layers": 2}, "num_hidden_layers in config.json is 2; allowed: 1 in an EAGLE-3 head"),
        (EAGLE3, {"norm_before_fc": True}, "norm_before_fc in config.json is True; allowed: false"),
        (
            EAGLE3,
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state in config.json is False; allowed: true",
        ),
        (
            EAGLE3,
            {IDS: [1, 17, 32]},
            f"{CONVENTION} in config.json is 'missing'; allowed: entering (id i is what enters layer i) or output",
        ),
        (SPECULATORS, {IDS: [2, 18, 33]}, f"{CONVENTION} in config.json is 'missing'; allowed: entering"),
        (EAGLE3, {IDS: [1, 2, 3], CONVENTION: "vllm"}, f"{CONVENTION} in config.json is 'vllm'; allowed: entering"),
        (
            EAGLE3,
            {IDS: [2, 2, 3], CONVENTION: "output"},
            f"{IDS} in config.json is [2, 2, 3]; allowed: three ascending",
        ),
        (
            EAGLE3,
            {IDS: [3, 2, 4], CONVENTION: "output"},
            f"{IDS} in config.json is [3, 2, 4]; allowed: three ascending",
        ),
        (EAGLE3, {IDS: [1, 2], CONVENTION: "output"}, f"{IDS} in config.json is [1, 2]; allowed: three ascending"),
        (
            EAGLE3,
            {IDS: [1, 2, 35], CONVENTION: "output"},
            f"{IDS} in config.json is [1, 2, 35]; allowed: three ascending ids that enter layers 0 to 35 of the target",
        ),
        (EAGLE3, {IDS: [-1, 2, 3], CONVENTION: "entering"}, f"{IDS} in config.json is [-1, 2, 3]; allowed: three"),
        (EAGLE3, {IDS: "2", CONVENTION: "entering"}, f"{IDS} in config.json is '2'; allowed: a list of three integers"),
        (
            SPECULATORS,
            {"norm_before_residual": None},
            "norm_before_residual in config.json is 'missing'; allowed: true or false: readers differ",
        ),
        (SPECULATORS, {"speculators_model_type": "eagle"}, "speculators_model_type in config.json is 'eagle'; allowed"),
    ],
)
def test_configs_of_heads_refused(name: str, fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_manifest(Path("head"), name, **fields)
    with pytest.raises(InputError) as told:
        load_drafter("head", target_of(name))
    assert message.replace("config.json", "head/config.json") in str(told.value)


@pytest.mark.parametrize("num_layers", [1, 4, 6])
def test_a_short_target_must_name_its_feature_layers(num_layers: int):
    target = model_config(Fields(Path("config.json"), small("llama", num_hidden_layers=num_layers)))
    config = Fields(Path("config.json"), shrink(MANIFESTS[EAGLE3]["config"]))
    default = (2, num_layers // 2, num_layers - 3)
    message = f"{IDS} in config.json is 'missing'; allowed: three ids; the published default 2, n//2, n-3 is {default}"
    with pytest.raises(InputError) as told:
        drafter_config(config, "eagle3", target)
    assert message in str(told.value)


class Anything:
    """Something that is not a tensor."""


def cut(file: str, share: float = 0.5) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(len(data) * share)])

    return damage


def put(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content)


def drop(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def edit(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """Change the tensors of a model.safetensors."""

    def damage(folder: Path) -> None:
        tensors = random_tensors(MANIFESTS[EAGLE3])
        change(tensors)
        save_file(tensors, folder / FORMS[0])

    return damage


def pickled(content: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(content, folder / "pytorch_model.bin")


def reindex(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the weight map of an index."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / FORMS[1]).read_text())
        change(index["weight_map"])
        (folder / FORMS[1]).write_text(json.dumps(index))

    return damage


SHARD = "model-00002-of-00003.safetensors"
MORE = "'a pickle of more than tensors'; allowed: what torch.load reads with weights_only=True"
COMPLETE = "allowed: a complete safetensors file"
DAMAGE = [
    (FORMS[0], drop("config.json"), "head/config.json is 'missing'; allowed: a JSON file"),
    (FORMS[0], put("config.json", b'{"a": '), "head/config.json is 'Expecting value"),
    (FORMS[0], put("config.json", b"\xff"), "allowed: valid JSON"),
    (FORMS[0], put("config.json", b"[1]"), "head/config.json is 'list'; allowed: a JSON object"),
    (FORMS[0], drop(FORMS[0]), "the weights in head is 'missing'; allowed: model.safetensors or"),
    (FORMS[0], cut(FORMS[0]), COMPLETE),
    (FORMS[0], cut(FORMS[0], 0.01), COMPLETE),
    (FORMS[0], put(FORMS[0], b""), "head/model.safetensors is 'damaged or cut short: "),
    (FORMS[1], drop(SHARD), f"head/{SHARD} is 'missing'; allowed: a file that can be read"),
    (FORMS[1], cut(SHARD), COMPLETE),
    (FORMS[1], put(FORMS[1], b"{}"), "weight_map in head/model.safetensors.index.json is {}; allowed: an object"),
    (FORMS[1], put(FORMS[1], b"{"), "head/model.safetensors.index.json is 'Expecting"),
    (
        FORMS[1],
        reindex(lambda keys: keys.update({"fc.weight": "../" + SHARD})),
        f"weight_map in head/{FORMS[1]} is '../{SHARD}'; allowed: names of files in the same folder",
    ),
    (
        FORMS[1],
        reindex(lambda keys: keys.update({"fc.bias": SHARD})),
        f"fc.bias in head/{SHARD} is 'missing'; allowed: a tensor, as {FORMS[1]} says",
    ),
    (FORMS[2], cut(FORMS[2]), "head/pytorch_model.bin is 'damaged or cut short: "),
    (FORMS[2], put(FORMS[2], b""), "head/pytorch_model.bin is 'damaged or cut short: "),
    (FORMS[2], put(FORMS[2], b"hello world"), "allowed: a complete PyTorch file"),
    (FORMS[2], pickled({"fc.weight": Anything()}), MORE),
    (FORMS[2], put(FORMS[2], pickle.dumps(Anything())), "head/pytorch_model.bin is "),
    (FORMS[2], pickled([torch.ones(2)]), "'a pickle of something else'; allowed: a state dict"),
    (FORMS[2], pickled({"state_dict": {}}), "'a pickle of something else'; allowed: a state dict"),
    (FORMS[3], drop("pytorch_model-00003-of-00003.bin"), "pytorch_model-00003-of-00003.bin is 'missing'"),
    (
        FORMS[0],
        edit(lambda t: t.pop("midlayer.hidden_norm.weight")),
        "midlayer.hidden_norm.weight in head is 'missing'; allowed: a tensor of shape [24]",
    ),
    (FORMS[0], edit(lambda t: t.pop("d2t")), "d2t in head is 'missing'; allowed: a tensor of shape [14]"),
    (FORMS[0], edit(lambda t: t.pop("fc.weight")), "fc.weight in head is 'missing'; allowed: a tensor of shape"),
    (
        FORMS[0],
        edit(lambda t: t.update({"fc.bias": torch.ones(24)})),
        "fc.bias in head/model.safetensors is 'unexpected'; allowed: the tensors that config.json describes",
    ),
    (
        FORMS[0],
        edit(lambda t: t.update({"fc.weight": torch.ones(24, 48)})),
        "the shape of fc.weight in head/model.safetensors is [24, 48]; allowed: [24, 72]",
    ),
    (
        FORMS[0],
        edit(lambda t: t.update({"fc.weight": torch.ones(24, 72, dtype=torch.int8)})),
        "the dtype of fc.weight in head/model.safetensors is 'torch.int8'; allowed: torch.float16 or",
    ),
    (
        FORMS[0],
        edit(lambda t: t.update({"model.fc.weight": torch.ones(24, 72)})),
        "fc.weight in model.safetensors again'; allowed: one of them",
    ),
    (
        FORMS[0],
        edit(lambda t: t["d2t"].__setitem__(13, 27)),
        "d2t[13] in head is 27; allowed: an offset to a target id of 0 to 39",
    ),
    (FORMS[0], edit(lambda t: t["d2t"].__setitem__(2, -3)), "d2t[2] in head is -3; allowed: an offset to"),
    (
        FORMS[0],
        edit(lambda t: t["d2t"].__setitem__(1, 2)),
        "d2t[1] in head is 2; allowed: an offset to a target id above 3, that of draft id 0",
    ),
    (
        FORMS[0],
        edit(lambda t: t["d2t"].__setitem__(slice(1, 3), torch.tensor([6, 3]))),
        "d2t[2] in head is 3; allowed: an offset to a target id above 7, that of draft id 1",
    ),
    (FORMS[0], edit(lambda t: t["t2d"].__setitem__(3, False)), "t2d[3] in head is False; allowed: True, as d2t has it"),
    (FORMS[0], edit(lambda t: t["t2d"].__setitem__(0, True)), "t2d[0] in head is True; allowed: False, as d2t has it"),
    (
        FORMS[0],
        edit(lambda t: t.update({"d2t": t["d2t"].float()})),
        "the dtype of d2t in head/model.safetensors is 'torch.float32'; allowed: torch.int64 or torch.int32",
    ),
]


@pytest.mark.parametrize(("form", "damage", "message"), DAMAGE)
def test_damaged_checkpoints(
    form: str, damage: Callable[[Path], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    folder, _ = write_manifest(Path("head"), EAGLE3, form)
    damage(folder)
    with pytest.raises(InputError) as told:
        load_drafter("head", target_of(EAGLE3))
    assert message in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("bias", "stored", "message"),
    [
        (True, False, "fc.bias in head is 'missing'; allowed: a tensor of shape [24]"),
        (False, True, "fc.bias in head/model.safetensors is 'unexpected'"),
        ("no", True, "bias in head/config.json is 'no'; allowed: true or false"),
    ],
)
def test_bias_of_eagle_fc_refused(bias: Any, stored: bool, message: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, tensors = write_manifest(Path("head"), EAGLE, bias=bias)
    if not stored:
        del tensors["fc.bias"]
        save_file(tensors, folder / FORMS[0])
    with pytest.raises(InputError) as told:
        load_drafter("head", target_of(EAGLE))
    assert message in str(told.value)


def test_a_target_is_not_a_drafter(tmp_path: Path):
    folder, _ = write_manifest(tmp_path, TARGETS[0])
    with pytest.raises(InputError, match=r"fc.weight in .* is 'missing'; allowed: an EAGLE-1, EAGLE-2 or EAGLE-3 head"):
        load_drafter(folder, target_of(EAGLE))


def test_an_untied_target_without_a_head(tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, "qwen3-8b")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / FORMS[0])
    with pytest.raises(InputError, match=r"lm_head.weight in .* is 'missing'; allowed: a tensor of shape \[40, 24\]"):
        load_target(folder)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("no such folder", "target is 'no such folder'; allowed: an existing folder, or a hub id such as"),
        ("/nowhere/at/all", "target is '/nowhere/at/all'; allowed: an existing folder, or a hub id such as"),
        ("./x", "target is './x'; allowed: an existing folder, or a hub id such as"),
        ("file", "target is 'file'; allowed: an existing folder, or a hub id such as"),
        ("specsim/not-there", "target is 'specsim/not-there'; allowed: an existing folder, or a hub id that can be"),
    ],
)
def test_places_that_cannot_be_reached(where: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The hub is offline under test, and its cache is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    Path("file").touch()
    with pytest.raises(InputError) as told:
        locate("target", where)
    assert message in str(told.value)


def test_a_snapshot_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pickles are fetched only where a repository has no safetensors."""
    folder, _ = write_manifest(tmp_path, EAGLE3, FORMS[2])
    asked = []

    def snapshot_download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns[-1]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load_drafter("someone/head", target_of(EAGLE3)).config.kind == "eagle3"
    assert asked == [("someone/head", "model*.safetensors"), ("someone/head", "pytorch_model*.bin")]


# Pairs


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shipped pair of random weights."""
    target, _ = write_manifest(tmp_path / "target", TARGETS[0])
    write_tokenizer(target)
    write_manifest(tmp_path / "eagle", EAGLE)
    write_manifest(tmp_path / "eagle3", EAGLE3)
    monkeypatch.setattr("specsim.models.shipped.TINY", tmp_path)
    return tmp_path


@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
def test_the_shipped_pair(drafter: str, zoo: Path):
    pair = load(drafter=drafter)
    assert pair.drafter.config.kind == drafter
    assert pair.name == f"tiny, {drafter}"
    assert pair.tokenizer.encode("a b a") == [0, 1, 0]
    assert pair.tokenizer.decode([1, 0]) == "b a"
    assert pair.tokenizer.vocab_size == 3


def test_a_target_alone(zoo: Path):
    assert load(drafter="none").drafter is None
    assert load(zoo / "target", drafter="none").name == str(zoo / "target")


def test_the_kind_of_a_drafter_of_ones_own_is_detected(zoo: Path):
    """Without a name for it."""
    for kind in ("eagle", "eagle3"):
        assert load(zoo / "target", zoo / kind).drafter.config.kind == kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafter": "medusa"}, "drafter is 'medusa'; allowed: eagle or eagle3 or none"),
        ({"draft": "x"}, "target is None; allowed: the target that the given drafter was trained for"),
        ({"target": "x"}, "draft is None; allowed: a drafter of the given target, or drafter none"),
        ({"target": "x", "draft": "y", "drafter": "none"}, "draft is 'y'; allowed: none where drafter is none"),
    ],
)
def test_arguments_of_load(arguments: dict[str, str], message: str):
    with pytest.raises(InputError) as told:
        load(**arguments)
    assert str(told.value) == message


def test_a_pair_shows_its_shapes(zoo: Path):
    pair = load()
    for text in (repr(pair), pair._repr_html_()):
        for fact in ("llama", "eagle3", "what enters layers 2, 16, 29", "bfloat16", "float16", "14 tokens"):
            assert fact in text
    parameters = sum(tensor.numel() for tensor in pair.target.tensors.values())
    assert f"{parameters:,}" in repr(pair.target)
    plain = Pair(pair.target, None, None, "<plain>")
    assert "&lt;plain&gt;" in plain._repr_html_()
    assert "drafter: None" in repr(plain)


def test_a_tied_head_is_counted_once(tmp_path: Path):
    folder, tensors = write_manifest(tmp_path, "qwen3-8b", tie_word_embeddings=True)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / FORMS[0])
    parameters = sum(tensor.numel() for tensor in tensors.values()) - 40 * 24
    assert f"parameters {parameters:,}" in repr(load_target(folder))


def test_a_folder_without_a_tokenizer(zoo: Path):
    (zoo / "target" / "tokenizer.json").unlink()
    assert load().tokenizer is None


def test_a_broken_tokenizer_is_told_when_it_is_used(zoo: Path):
    (zoo / "target" / "tokenizer.json").write_text("{")
    tokenizer = load().tokenizer
    with pytest.raises(InputError, match=r"the tokenizer in .* is .*; allowed: a tokenizer that transformers loads"):
        tokenizer.encode("a")
    with pytest.raises(AttributeError):
        _ = tokenizer._private


def test_loading_imports_no_heavy_library(tmp_path: Path):
    folder, _ = write_manifest(tmp_path, TARGETS[0])
    code = (
        "import sys, specsim.models.checkpoint as c; c.load_target(sys.argv[1]); "
        "print([m for m in ('transformers', 'triton', 'huggingface_hub', 'specsim.reference') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_drafter_of_another_kind_than_named_is_refused():
    from specsim.models.shipped import TINY

    with pytest.raises(InputError, match=r"drafter is 'eagle'; allowed: eagle3, the kind of the one in"):
        load(TINY / "target", TINY / "eagle3", drafter="eagle")


def test_fields_that_a_head_lacks_can_be_said_when_loading(tmp_path: Path):
    from specsim.models.shipped import TINY

    shutil.copytree(TINY / "eagle3", tmp_path / "head")
    config = json.loads((TINY / "eagle3" / "config.json").read_text())
    del config["eagle_aux_hidden_state_convention"]
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="eagle_aux_hidden_state_convention"):
        load(TINY / "target", tmp_path / "head")
    said = {"eagle_aux_hidden_state_convention": "output", "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert load(TINY / "target", tmp_path / "head", draft_fields=said).drafter.config.feature_layers == (1, 2, 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: {**t, 1: torch.ones(2)}, "allowed: a state dict"),
        (lambda t: {**t, "norm.weight": torch.ones(256).to_sparse()}, "allowed: a state dict"),
        (lambda t: {**t, "norm.weight": torch.full((256,), torch.nan)}, "norm.weight .* allowed: finite weights"),
    ],
    ids=["a key that is no name", "sparse", "nan"],
)
def test_tensors_that_cannot_be_weights(tmp_path: Path, damage: Callable, message: str):
    from safetensors.torch import load_file

    from specsim.models.shipped import TINY

    (tmp_path / "config.json").write_bytes((TINY / "eagle3" / "config.json").read_bytes())
    torch.save(damage(load_file(TINY / "eagle3" / "model.safetensors")), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=message):
        load(TINY / "target", tmp_path)


def test_json_nested_too_deeply(tmp_path: Path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="allowed: valid JSON"):
        load(tmp_path, drafter="none")


def test_pairs_compare_by_identity():
    pair = load()
    assert pair == pair
    assert pair != load()
    assert hash(pair)
