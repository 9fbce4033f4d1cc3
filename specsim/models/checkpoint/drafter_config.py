"""Shape of an EAGLE head, from a config.json of the EAGLE repository, SGLang or speculators."""

from itertools import pairwise
from pathlib import Path

from specsim.core.drafter import DrafterConfig
from specsim.core.errors import InputError, require
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.model_config import model_config

# Fields that a head's config may leave to its target. RoPE is not among them: published heads that do not name it were
# trained with the default base of 10000, whatever their target has.
_INHERITED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}
_INHERITED_HEADS = {"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
# Fields of published variants, with the one value that is supported.
_ONLY = {"norm_before_fc": False, "use_aux_hidden_state": True}


def drafter_config(fields: Fields, kind: str, target: ModelConfig) -> DrafterConfig:
    """Read the shape of an EAGLE head (`kind` eagle or eagle3), and check that it fits its target."""
    layer = fields.mapping("transformer_layer_config") if is_speculators(fields) else fields
    fields = fields.filled(fields.mapping("eagle_config").given)
    for name, only in _ONLY.items():
        if fields.flag(name, default=only) != only:
            raise fields.error(name, str(only).lower())
    model = model_config(_inherit(layer, target))
    config = DrafterConfig("eagle", model, draft_vocab_size=model.vocab_size, target_hidden_size=model.hidden_size)
    if kind == "eagle3":
        config = _eagle3(fields, model, target)
    _check_fit(config, target, fields.file)
    return config


def is_speculators(fields: Fields) -> bool:
    """Check whether vLLM's speculators wrote this config, or raise InputError for a kind other than EAGLE-3."""
    name = "speculators_model_type"
    return bool(fields.get(name)) and fields.choice(name, ("eagle3",)) == "eagle3"


def _inherit(layer: Fields, target: ModelConfig) -> Fields:
    """Complete a head's fields with its target's, as a Llama layer."""
    layer.choice("model_type", ("llama",), default="llama")
    names = _INHERITED if layer.get("num_attention_heads") else _INHERITED | _INHERITED_HEADS
    inherited = {name: getattr(target, field) for name, field in names.items()}
    values = {"model_type": "llama", "num_hidden_layers": 1, **inherited, **layer.given}
    return Fields(layer.file, values, layer.read_names)


def _eagle3(fields: Fields, model: ModelConfig, target: ModelConfig) -> DrafterConfig:
    require(model.num_layers == 1, f"num_hidden_layers in {fields.file}", model.num_layers, "1 in an EAGLE-3 head")
    if is_speculators(fields) and fields.get("norm_before_residual") is None:
        raise fields.error("norm_before_residual", "true or false, as readers of the format differ in its default")
    return DrafterConfig(
        kind="eagle3",
        model=model,
        draft_vocab_size=fields.integer("draft_vocab_size", default=model.vocab_size),
        target_hidden_size=fields.integer("target_hidden_size", default=model.hidden_size),
        feature_layers=_feature_layers(fields, target.num_layers),
        norm_before_residual=fields.flag("norm_before_residual"),
    )


def _feature_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Read the target layers whose inputs are an EAGLE-3 head's features."""
    name = "eagle_aux_hidden_state_layer_ids"
    ids = fields.get(name)
    if ids is None:
        layers = (2, num_layers // 2, num_layers - 3)
        allowed = f"three ids; the published default 2, n//2, n-3 is {layers} for a target of {num_layers} layers"
    else:
        if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
            raise fields.error(name, "a list of three integers")
        layers = tuple(layer + _offset(fields) for layer in ids)
        allowed = f"three ascending ids for inputs of layers 0 to {num_layers - 1} of the target"
    ascending = all(a < b for a, b in pairwise(layers))
    if len(layers) != 3 or not ascending or layers[0] < 0 or layers[-1] >= num_layers:
        raise fields.error(name, allowed)
    return layers


def _offset(fields: Fields) -> int:
    """Return 1 where ids name a layer's output, the next layer's input, and 0 where they name its input.

    Both conventions are in use, so neither is assumed.
    """
    name = "eagle_aux_hidden_state_convention"
    if fields.get(name) not in ("entering", "output"):
        raise fields.error(name, "entering (id i: the input of layer i) or output (id i: the output of layer i)")
    return int(fields.get(name) == "output")


def _check_fit(config: DrafterConfig, target: ModelConfig, file: Path) -> None:
    """Check that a head has its target's vocabulary and width."""
    model = config.model
    width = config.target_hidden_size
    if model.vocab_size != target.vocab_size:
        raise InputError(f"vocab_size in {file}", model.vocab_size, f"{target.vocab_size}, the target's")
    name = "hidden_size" if width == model.hidden_size else "target_hidden_size"
    require(width == target.hidden_size, f"{name} in {file}", width, f"{target.hidden_size}, the target's hidden_size")
    if config.draft_vocab_size > target.vocab_size:
        allowed = f"at most {target.vocab_size}, the target's vocab_size"
        raise InputError(f"draft_vocab_size in {file}", config.draft_vocab_size, allowed)
