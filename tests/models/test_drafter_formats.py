"""MTP modules, drafters on frozen KV and language models load from every format that they are published in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specsim.core.errors import InputError
from specsim.core.frozen_kv import FrozenKVConfig
from specsim.core.mtp import MtpConfig
from specsim.core.rank_part import DRAFTER_TABLES, RankPart
from specsim.core.target import ModelConfig
from specsim.models.checkpoint import load_drafter, load_target
from specsim.models.checkpoint.drafter_format import drafter_formats, drafter_kind, drafter_layout
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.layout import target_layout
from specsim.models.load import Parts, load
from specsim.models.tiny_config import tiny_config

Tensors = dict[str, torch.Tensor]
TARGET = tiny_config(num_layers=4, vocab_size=40, hidden_size=24, intermediate_size=20, head_dim=6)
XIAOMI = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"}
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}


@pytest.mark.parametrize(
    ("fields", "names", "kind"),
    [
        ({"dflash_config": {"mask_token_id": 1}, "markov_rank": 0}, "fc", "dspark"),
        ({"dflash_config": {"mask_token_id": 1}, "parallel_drafting": True}, "fc", "dflash"),
        ({"parallel_drafting": True, "draft_vocab_size": 8}, "fc midlayer.hidden_norm", "p-eagle"),
        ({"draft_vocab_size": 8, "backbone_hidden_size": 8}, "pre_projection", "eagle3"),
        ({"backbone_hidden_size": 8}, "fc midlayer.hidden_norm", "frozen-kv"),
        ({}, "fc embed_tokens norm layers.0.input_layernorm layers.0.hidden_norm", "eagle3"),
        ({"num_nextn_predict_layers": 1}, "fc embed_tokens norm layers.0.input_layernorm", "eagle"),
        ({"num_nextn_predict_layers": 1}, "embed_tokens norm layers.0.input_layernorm mtp.fc", "standalone"),
        ({"num_nextn_predict_layers": 1}, "embed_tokens norm", "mtp"),
    ],
)
def test_marks_of_two_kinds_name_the_special_one(fields: dict[str, Any], names: str, kind: str):
    keys = [f"model.{name}.weight" for name in names.split()]
    assert drafter_kind(Fields(Path("config.json"), fields), keys) == kind


def test_every_kind_has_a_precedence_of_its_own():
    ranks = [each.precedence for each in drafter_formats().values()]
    assert len(set(ranks)) == len(ranks) > 0


def renamed(name: str, names: dict[str, str]) -> str:
    module, dot, part = name.rpartition(".")
    return f"{names.get(module, module)}{dot}{part}"


def qwen(_: int, name: str) -> str:
    return f"mtp.{renamed(name, QWEN)}" if name.rpartition(".")[0] in QWEN else f"mtp.layers.0.{name}"


# Our name of a module's tensor to that of the format, with the manifest of a published checkpoint.
FORMATS: dict[str, tuple[Callable[[int, str], str], str]] = {
    "own": (lambda index, name: f"modules.{index}.{name}", ""),
    "deepseek": (lambda k, name: f"model.layers.{4 + k}.{renamed(name, {'norm': 'shared_head.norm'})}", "deepseek-v3"),
    "glm": (lambda k, name: f"model.layers.{4 + k}.{renamed(name, {'norm': 'shared_head.norm'})}", "glm-4.5-air"),
    "qwen": (qwen, "qwen3-next-80b"),
    "mimo": (lambda index, name: f"model.mtp_layers.{index}.{renamed(name, XIAOMI)}", "mimo-7b"),
    "speculators": (lambda index, name: f"mtp_layers.{index}.{renamed(name, XIAOMI)}", "qwen3-8b-speculators"),
}
EXPERTS = ("deepseek", "glm", "qwen")
every_format = pytest.mark.parametrize("form", FORMATS)


def fields_of(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "max_position_embeddings")
    heads = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
    names = {name: getattr(config, name) for name in sizes} | heads | {"rope_theta": config.rope.theta}
    return names | {"model_type": config.family, "num_hidden_layers": config.num_layers} | changes


def drawn(layout: dict[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in layout.items()}


def modules(form: str, count: int, family: str = "llama") -> tuple[Tensors, Tensors]:
    """Make modules under our names, and under those of a format."""
    model = tiny_config(family, count, vocab_size=40, hidden_size=24, intermediate_size=20, head_dim=6)
    own = drawn(drafter_layout(MtpConfig(model, 40, 24, num_modules=count)).required)
    published = {}
    for key, tensor in own.items():
        _, index, name = key.split(".", 2)
        is_swapped = form == "mimo" and name == "eh_proj.weight"
        columns = torch.arange(48).roll(24) if is_swapped else slice(None)
        published[FORMATS[form][0](int(index), name)] = tensor[:, columns] if is_swapped else tensor
    return own, published


def assert_same(found: Any, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def mtp_folder(folder: Path, form: str, published, count: int = 1, **fields: Any) -> tuple[Path, Tensors]:
    """Write a target with modules of a format in its folder."""
    own, tensors = modules(form, count)
    target = drawn(target_layout(TARGET), seed=1)
    if form in ("deepseek", "glm"):
        for index in range(count):
            layer = f"model.layers.{4 + index}"
            tensors[f"{layer}.embed_tokens.weight"] = target["model.embed_tokens.weight"].clone()
            tensors[f"{layer}.shared_head.head.weight"] = target["lm_head.weight"].clone()
    number = {} if form == "qwen" else {"num_nextn_predict_layers": count}
    return published.save(folder, fields_of(TARGET, **number, **fields), target | tensors), own


# MTP


@every_format
def test_mtp_modules_in_the_folder_of_their_target(form: str, tmp_path: Path, published):
    count = 1 if form == "qwen" else 2
    folder, own = mtp_folder(tmp_path, form, published, count)
    target = load_target(folder)
    assert_same(target.tensors, drawn(target_layout(TARGET), seed=1))
    drafter = load_drafter(folder, target.config, kind="mtp")
    assert_same(drafter.tensors, own)
    assert (drafter.config.num_modules, drafter.config.model.num_layers) == (count, count)
    assert (drafter.config.hidden_chain, drafter.config.model.rope.theta) == (True, TARGET.rope.theta)


@every_format
def test_ranks_read_slices_of_mtp_modules(form: str, tmp_path: Path, published):
    """Copies of embedding and head in a module are sliced as the target's, with which they are compared."""
    folder, own = mtp_folder(tmp_path, form, published)
    for rank in range(2):
        part = RankPart(rank, 2)
        pair = load(folder, drafter="mtp", parts=Parts(part, part))
        assert pair.checkpoint is not None
        assert_same(pair.checkpoint.tensors_of(part), part.tensors(own, DRAFTER_TABLES))
        assert_same(pair.target.tensors_of(part), part.tensors(drawn(target_layout(TARGET), seed=1)))


@pytest.mark.parametrize("form", ["own", "speculators"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_mtp_modules_in_a_folder_of_their_own(form: str, family: str, tmp_path: Path, published):
    """Fields that config.json leaves out come from the target."""
    own, tensors = modules(form, 2, family)
    config = tiny_config(family, 4, vocab_size=40, hidden_size=24, intermediate_size=20, head_dim=6, rope_theta=5e5)
    fields = {"num_nextn_predict_layers": 2, "hidden_chain": False}
    if form == "speculators":
        fields |= {"speculators_model_type": "mtp", "transformer_layer_config": fields_of(config)}
        tensors["verifier_lm_head.weight"] = torch.ones(40, 24)
    drafter = load_drafter(published.save(tmp_path, fields, tensors), config)
    assert_same(drafter.tensors, own)
    assert (drafter.config.kind, drafter.config.hidden_chain) == ("mtp", False)
    assert (drafter.config.model.family, drafter.config.model.rope.theta) == (family, 5e5)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "own"])
def test_the_names_of_mtp_modules_are_the_published_ones(form: str, published):
    """Dense modules have every tensor of the manifest but biases; those of experts all but attention and MLP."""
    rename, name = FORMATS[form]
    manifest = published.manifests[f"mtp-{name}"]
    layer = f"layers.{manifest['config'].get('num_hidden_layers')}."
    family = "qwen3" if form == "speculators" else "llama"
    ours = {rename(0, key.split(".", 2)[2]).replace("layers.4.", layer) for key in modules(form, 1, family)[0]}
    theirs = {key for key in manifest["tensors"] if not key.endswith(("bias", "embed_tokens.weight", "head.weight"))}
    if form in EXPERTS:
        ours, theirs = (
            {key for key in keys if ".mlp." not in key and "self_attn" not in key} for keys in (ours, theirs)
        )
    assert ours == theirs
    assert len(ours) == (6 if form in EXPERTS else 15 if form == "speculators" else 13)


@pytest.mark.parametrize("form", EXPERTS)
def test_mtp_modules_of_experts_are_refused(form: str, tmp_path: Path, published):
    """One sentence names the first such tensor and the supported layers."""
    manifest = published.manifests[f"mtp-{FORMATS[form][1]}"]
    tensors = {key: torch.ones(1) for key in manifest["tensors"]}
    config = fields_of(TARGET, num_hidden_layers=manifest["config"]["num_hidden_layers"], num_nextn_predict_layers=1)
    folder = published.save(tmp_path, config, tensors)
    with pytest.raises(InputError) as caught:
        load_drafter(folder, TARGET)
    assert any(part in caught.value.name for part in ("experts", "mlp.gate.", "shared_expert", "_a_", "_b_"))
    assert "dense, as in Llama, Qwen3 and Mistral" in caught.value.allowed


def test_the_order_of_a_projection_can_be_named(tmp_path: Path, published):
    own, tensors = modules("mimo", 1)
    folder = published.save(tmp_path, {"num_nextn_predict_layers": 1, "mtp_hidden_states_first": False}, tensors)
    found = load_drafter(folder, TARGET).tensors["modules.0.eh_proj.weight"]
    assert torch.equal(found, own["modules.0.eh_proj.weight"].roll(24, dims=1))


@pytest.mark.parametrize("number", [0, None])
def test_missing_mtp_modules(number: int | None, tmp_path: Path, published):
    config = fields_of(TARGET, num_nextn_predict_layers=number)
    folder = published.save(tmp_path, config, drawn(target_layout(TARGET)))
    with pytest.raises(InputError) as caught:
        load_drafter(folder, TARGET, kind="mtp")
    assert caught.value.name == f"num_nextn_predict_layers in {folder / 'config.json'}"
    assert (caught.value.value, "at least 1" in caught.value.allowed) == ("missing" if number is None else 0, True)


def test_a_module_with_a_head_of_its_own_is_refused(tmp_path: Path, published):
    folder, _ = mtp_folder(tmp_path, "deepseek", published)
    tensors = drawn(target_layout(TARGET), seed=1) | modules("deepseek", 1)[1]
    tensors["model.layers.4.shared_head.head.weight"] = torch.ones(40, 24)
    published.save(folder, json.loads((folder / "config.json").read_text()), tensors)
    name = f"model.layers.4.shared_head.head.weight in {folder / 'model.safetensors'}"
    with pytest.raises(InputError, check=lambda error: error.name == name):
        load_drafter(folder, TARGET, kind="mtp")


@pytest.mark.parametrize(
    ("fields", "name", "file"),
    [
        ({"num_nextn_predict_layers": 2}, "MTP module 1", ""),
        ({"hidden_size": 32}, "hidden_size", "/config.json"),
        ({"vocab_size": 41}, "vocab_size", "/config.json"),
    ],
)
def test_other_mtp_modules_than_named(fields: dict[str, int], name: str, file: str, tmp_path: Path, published):
    _, tensors = modules("own", 1)
    folder = published.save(tmp_path, {"num_nextn_predict_layers": 1, **fields}, tensors)
    with pytest.raises(InputError, check=lambda error: error.name == f"{name} in {folder}{file}"):
        load_drafter(folder, TARGET)


# Frozen KV


def frozen_kv(folder: Path, published, prefix: str = "", **fields: Any) -> tuple[Path, Tensors]:
    model = tiny_config(num_layers=2, vocab_size=40, hidden_size=16, intermediate_size=20, head_dim=6)
    own = drawn(drafter_layout(FrozenKVConfig(model, 40, 24)).required)
    names = {key: f"{prefix}{key}" if key.startswith(("layers", "norm")) else key for key in own}
    config = {"backbone_hidden_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    return published.save(folder, config | fields, {names[key]: tensor for key, tensor in own.items()}), own


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("position", ["last", "next"])
def test_a_drafter_on_frozen_kv(prefix: str, position: str, tmp_path: Path, published):
    folder, own = frozen_kv(tmp_path, published, prefix, position=position)
    drafter = load_drafter(folder, TARGET)
    assert_same(drafter.tensors, own)
    config = drafter.config
    assert (config.kind, config.position, config.target_hidden_size) == ("frozen-kv", position, 24)
    assert (config.model.num_layers, config.model.hidden_size) == (2, 16)
    assert (config.model.num_kv_heads, config.model.head_dim) == (TARGET.num_kv_heads, TARGET.head_dim)


def test_a_tied_head_on_frozen_kv(tmp_path: Path, published):
    folder, own = frozen_kv(tmp_path, published, "model.", tie_word_embeddings=True)
    tensors = {f"model.{key}" if key.startswith(("layers", "norm")) else key: each for key, each in own.items()}
    tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    published.save(folder, json.loads((folder / "config.json").read_text()), tensors)
    assert_same(load_drafter(folder, TARGET).tensors, own)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"backbone_hidden_size": 32}, "backbone_hidden_size"),
        ({"position": "first"}, "position"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 8}, "head_dim"),
        ({"rope_theta": 7.0}, "rope_theta"),
        ({"vocab_size": 41}, "vocab_size"),
        ({"model_type": "mistral", "sliding_window": 5}, "sliding_window"),
    ],
)
def test_drafters_on_frozen_kv_refused(fields: dict[str, Any], name: str, tmp_path: Path, published):
    folder, _ = frozen_kv(tmp_path, published, **fields)
    with pytest.raises(InputError, check=lambda error: error.name == f"{name} in {folder / 'config.json'}"):
        load_drafter(folder, TARGET)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.pre_feedforward_layernorm.weight",  # of a Gemma 4 layer
        "model.layers.1.self_attn.k_proj.weight",
        "masked_embedding.centroids.weight",
    ],
)
def test_parts_of_other_layers_on_frozen_kv_are_refused(key: str, tmp_path: Path, published):
    """Gemma 4's own assistants have four norms a layer and may have a head of centroids."""
    folder, own = frozen_kv(tmp_path, published)
    published.save(folder, json.loads((folder / "config.json").read_text()), own | {key: torch.ones(16)})
    with pytest.raises(InputError) as caught:
        load_drafter(folder, TARGET)
    assert caught.value.name == f"{key} in {folder / 'model.safetensors'}"
    assert caught.value.allowed.startswith("a drafter of layers as in Llama, Qwen3 and Mistral")


def test_the_shape_of_a_gemma_4_assistant_is_nested(tmp_path: Path, published):
    folder, own = frozen_kv(tmp_path, published)
    layer = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    published.save(folder, {"backbone_hidden_size": 24, "text_config": layer}, own)
    assert load_drafter(folder, TARGET).config.model.hidden_size == 16
    published.save(folder, {"backbone_hidden_size": 24, "text_config": layer | {"model_type": "gemma4_text"}}, own)
    with pytest.raises(InputError, check=lambda error: error.value == "gemma4_text"):
        load_drafter(folder, TARGET)


# Language models


def test_a_language_model_is_a_standalone_drafter(tmp_path: Path, published):
    config = tiny_config("qwen3", 2, vocab_size=40, hidden_size=16)
    tensors = drawn(target_layout(config))
    drafter = load_drafter(published.save(tmp_path, fields_of(config), tensors), TARGET)
    assert_same(drafter.tensors, tensors)
    assert (drafter.config.kind, drafter.config.model.family, drafter.config.feature_layers) == (
        "standalone",
        "qwen3",
        (),
    )
    assert drafter.config.model.hidden_size == 16


def test_a_language_model_with_mtp_modules_is_either_drafter(tmp_path: Path, published):
    folder, own = mtp_folder(tmp_path, "deepseek", published)
    assert load_drafter(folder, TARGET).config.kind == "standalone"
    assert_same(load_drafter(folder, TARGET, kind="mtp").tensors, own)
