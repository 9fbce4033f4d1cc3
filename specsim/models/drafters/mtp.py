"""MTP modules, from a folder of their own or from their target's.

Tensors are `modules.k.*` with DeepSeek-V3's names below: enorm, hnorm, eh_proj [H, 2H] in the order embedding, hidden
state, one layer, norm.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch

from specsim.core.errors import InputError, require
from specsim.core.mtp import MtpConfig
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import Experts, LayerConfig, ModelConfig
from specsim.models.checkpoint.drafter_format import DrafterFormat, DrafterLayout
from specsim.models.checkpoint.expert_tensors import gather_experts
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.language_model import ModuleKey, is_language_model, module_key, num_modules_of
from specsim.models.checkpoint.layer_fields import deepseek_experts, read_attention
from specsim.models.checkpoint.layout import Layout, layer_layout, norm_layout
from specsim.models.checkpoint.model_config import decoder_config, one_window
from specsim.models.checkpoint.weights import COPIES, Stored, by_name, check_layout

_KEYS = r"modules\.\d+\.|mtp\.|mtp_layers\.\d+\.|layers\.\d+\.(enorm|hnorm|eh_proj)\."
_DENSE = (
    r"(enorm|hnorm|norm|eh_proj|input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)"
    r"|mlp\.(gate|up|down)_proj)\.(weight|bias)"
)


def _matches(fields: Fields, names: Collection[str], is_wanted: bool) -> bool:
    """Check for modules without a language model, whose folder has them only for a caller that names them."""
    if is_language_model(names):
        return is_wanted
    return bool(fields.get("num_nextn_predict_layers")) or any(re.match(_KEYS, name) for name in names)


def _layout(config: MtpConfig) -> DrafterLayout:
    """List the tensors of MTP modules, whose eh_proj reads the normed embedding and the normed hidden state.

    Embedding and head are the target's.
    """
    model = config.model
    width = model.hidden_size
    layout: Layout = {}
    for index in range(config.num_modules):
        module = f"modules.{index}"
        layout |= norm_layout(module, width, "enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "norm")
        layout[f"{module}.eh_proj.weight"] = (width, 2 * width)
        layout |= layer_layout(module, model.layers[index], width, width)
    return DrafterLayout(layout, {})


def _load(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    config, named = _read(fields, stored, target)
    named = gather_experts(named, config.model, "modules")
    return DrafterCheckpoint(config, check_layout(named, fields.file.parent, *_layout(config)))


def _read(fields: Fields, stored: Iterable[Stored], target: ModelConfig) -> tuple[MtpConfig, dict[str, Stored]]:
    """Read the shape of MTP modules, and their tensors under our names."""
    folder = fields.file.parent
    by_key = by_name(stored, lambda key: key)
    num_layers = fields.integer("num_hidden_layers", default=target.num_layers)
    mtp_keys = {key: module_key(key, num_layers, num_modules_of(fields)) for key in by_key}
    modules = {key: mtp_key for key, mtp_key in mtp_keys.items() if mtp_key}
    indices = {mtp_key.module for mtp_key in modules.values()} - {None}
    if not indices or fields.get("num_nextn_predict_layers") == 0:
        raise fields.error("num_nextn_predict_layers", f"at least 1, with tensors of MTP modules in {folder}")
    num_modules = fields.integer("num_nextn_predict_layers", default=len(indices))
    for index in range(num_modules):
        allowed = f"{num_modules} modules, as num_nextn_predict_layers says"
        require(index in indices, f"MTP module {index} in {folder}", "missing", allowed)
    named: dict[str, Stored] = {}
    for key, mtp_key in modules.items():
        for index in range(num_modules) if mtp_key.module is None else [mtp_key.module]:
            if entry := _entry(by_key, key, mtp_key, fields, target):
                named[f"modules.{index}.{mtp_key.name}"] = entry
    named |= {key: by_key[key] for key, mtp_key in mtp_keys.items() if not mtp_key and not _of_model(key, num_layers)}
    return _config(fields, num_modules, target), named


def _entry(
    by_key: Mapping[str, Stored], key: str, mtp_key: ModuleKey, fields: Fields, target: ModelConfig
) -> Stored | None:
    """Take a tensor as our projections read it, None for a copy of a tensor of the target."""
    entry = by_key[key]
    if mtp_key.name in COPIES:
        target_entry = by_key.get(COPIES[mtp_key.name])
        if target_entry and not torch.equal(target_entry.tensor, entry.tensor):
            raise InputError(
                f"{key} in {entry.file}", "another tensor", f"equal to {target_entry.key}, as every module shares it"
            )
        return None
    if target.family != "deepseek_v3" and not re.fullmatch(_DENSE, mtp_key.name):
        allowed = "a module whose layer is dense, as in Llama, Qwen3 and Mistral; not of experts or latent attention"
        raise InputError(f"{key} in {entry.file}", "a part of another kind of layer", allowed)
    is_swapped = fields.flag("mtp_hidden_states_first", default=mtp_key.is_swapped)
    if mtp_key.name == "eh_proj.weight" and is_swapped and entry.tensor.dim() == 2:
        return entry._replace(tensor=torch.cat(entry.tensor.chunk(2, dim=1)[::-1], dim=1))
    return entry


def _config(fields: Fields, num_modules: int, target: ModelConfig) -> MtpConfig:
    layer = fields.mapping("transformer_layer_config") if fields.get("speculators_model_type") else fields
    model = _deepseek(layer, target) if target.family == "deepseek_v3" else _dense(layer, target)
    for name in ("vocab_size", "hidden_size"):
        target_size = getattr(target, name)
        require(
            getattr(model, name) == target_size,
            f"{name} in {fields.file}",
            getattr(model, name),
            f"{target_size}, the target's",
        )
    model = replace(model, layers=num_modules * model.layers[-1:], tie_word_embeddings=False, eos_token_ids=())
    chained = fields.flag("hidden_chain", default=True)
    return MtpConfig(model, model.vocab_size, target.hidden_size, num_modules=num_modules, hidden_chain=chained)


def _dense(layer: Fields, target: ModelConfig) -> ModelConfig:
    """Read a module whose layers are as in Llama, with the window of all layers if they have one."""
    model = decoder_config(layer, target)
    return model.with_windows([one_window(model)] * model.num_layers)


def _deepseek(layer: Fields, target: ModelConfig) -> ModelConfig:
    """Read a module of latent attention and experts, whatever `first_k_dense_replace` is, as in DeepSeek-V3."""
    sizes = {name: layer.integer(name, default=getattr(target, name)) for name in ("vocab_size", "hidden_size")}
    if layer.get("kv_lora_rank"):
        attention = read_attention("deepseek_v3", layer, 1)[0]
        return replace(target, layers=(LayerConfig(attention, deepseek_experts(layer)),), **sizes)
    experts = [decoder_layer for decoder_layer in target.layers if isinstance(decoder_layer.mlp, Experts)]
    if not experts:
        raise layer.error("n_routed_experts", "the experts of a module, which this target's layers do not have")
    return replace(target, layers=tuple(experts[-1:]), **sizes)


def _of_model(key: str, num_layers: int) -> bool:
    """Whether a key is of the language model that the modules belong to."""
    bare = key.removeprefix("model.")
    if bare in ("embed_tokens.weight", "norm.weight", "lm_head.weight"):
        return True
    layer = re.match(r"layers\.(\d+)\.", bare)
    return layer is not None and int(layer[1]) < num_layers


FORMAT = DrafterFormat(
    precedence=6,
    matches=_matches,
    load=_load,
    layout=_layout,
    speculators="mtp",
)
