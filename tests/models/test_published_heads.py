"""Heads as published (config.json with shrunk sizes) load, or one sentence names the field that a user has to give.

Tensors are those of the classes that wrote the heads, listed here and not by our layouts.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specsim.core.errors import InputError
from specsim.core.pair import DrafterCheckpoint, Pair
from specsim.correctness.differential import check
from specsim.correctness.differential.cell import cell_of
from specsim.models.checkpoint import load_drafter
from specsim.models.synthetic_pair import random_target
from specsim.models.tiny_config import tiny_config

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_heads.json").read_text())
VOCAB = 64
SMALL = {"vocab_size": VOCAB, "draft_vocab_size": 16, "mask_token_id": 60}
CONVENTION = "eagle_aux_hidden_state_convention"
IDS = "eagle_aux_hidden_state_layer_ids"


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """Give a head a vocabulary of 64 tokens, and 16 drafts where it has fewer."""
    small = {name: shrunk(value) if isinstance(value, dict) else value for name, value in fields.items()}
    layer = fields | fields.get("transformer_layer_config", {})
    has_all = layer.get("draft_vocab_size") == layer.get("vocab_size")
    sizes = SMALL | ({"draft_vocab_size": VOCAB} if has_all else {})
    return small | {name: value for name, value in sizes.items() if fields.get(name) is not None}


def linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def latent_shapes(name: str, fields: dict[str, Any], width: int) -> Shapes:
    """DeepSeek's attention, whose first projections read `width` channels."""
    heads, query, latent, rope = (
        fields[key] for key in ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
    )
    nope, value = fields["qk_nope_head_dim"], fields["v_head_dim"]
    norms = {f"{name}.q_a_layernorm.weight": (query,), f"{name}.kv_a_layernorm.weight": (latent,)}
    down = linear(f"{name}.q_a_proj", query, width) | linear(f"{name}.kv_a_proj_with_mqa", latent + rope, width)
    up = linear(f"{name}.q_b_proj", heads * (nope + rope), query)
    up |= linear(f"{name}.kv_b_proj", heads * (nope + value), latent)
    return norms | down | up | linear(f"{name}.o_proj", fields["hidden_size"], heads * value)


def layer_shapes(name: str, fields: dict[str, Any], width: int, kind: str, *norms: str) -> Shapes:
    """A layer of the kind qwen3, qwen2, latent or llama, with norms besides the one before the MLP."""
    hidden, size, heads, groups = (
        fields[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = fields.get("head_dim") or hidden // heads
    attention = f"{name}.self_attn"
    if kind == "latent":
        shapes = latent_shapes(attention, fields, width)
    else:
        shapes = linear(f"{attention}.q_proj", heads * dim, width, kind == "qwen2")
        shapes |= linear(f"{attention}.k_proj", groups * dim, width, kind == "qwen2")
        shapes |= linear(f"{attention}.v_proj", groups * dim, width, kind == "qwen2")
        shapes |= linear(f"{attention}.o_proj", hidden, heads * dim)
    if kind == "qwen3":
        shapes |= {f"{attention}.{part}_norm.weight": (dim,) for part in "qk"}
    shapes |= linear(f"{name}.mlp.gate_proj", size, hidden) | linear(f"{name}.mlp.up_proj", size, hidden)
    shapes |= linear(f"{name}.mlp.down_proj", hidden, size)
    return shapes | {f"{name}.{norm}.weight": (hidden,) for norm in ("post_attention_layernorm", *norms)}


def kind_of(name: str) -> str:
    """Kind of the layers: a class of Llama layers has those, whatever its model_type."""
    config = CONFIGS[name]
    if name in ("yuhuili-eagle-qwen2", "kimi-eagle3-mla"):
        return "latent" if "kimi" in name else "qwen2"
    named = config.get("transformer_layer_config", {}).get("model_type")
    return "qwen3" if "block_size" in config or named == "qwen3" else "llama"


def block_shapes(fields: dict[str, Any], kind: str) -> Shapes:
    hidden, count = fields["hidden_size"], fields["num_hidden_layers"]
    fields = fields | fields.get("dflash_config", {})
    ids = fields.get("target_layer_ids") or fields.get("aux_hidden_state_layer_ids") or range(count)
    shapes = linear("fc", hidden, len(ids) * hidden) | {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(count):
        shapes |= layer_shapes(f"layers.{layer}", fields, hidden, kind, "input_layernorm")
    if rank := fields.get("markov_rank"):
        shapes |= {f"markov_head.markov_{part}.weight": (VOCAB, rank) for part in ("w1", "w2")}
        shapes |= linear("confidence_head.proj", 1, hidden + rank, bias=True)
    drafts = fields.get("draft_vocab_size", VOCAB)
    return shapes | ({} if drafts == VOCAB else linear("lm_head", drafts, hidden))


def eagle3_shapes(name: str, fields: dict[str, Any], kind: str) -> Shapes:
    hidden, drafts = fields["hidden_size"], fields["draft_vocab_size"] or VOCAB
    feature = fields.get("target_hidden_size") or hidden
    is_p_eagle = "peagle" in name
    first = "layers.0" if is_p_eagle or "speculators_model_type" in fields else "midlayer"
    shapes = linear("fc", hidden, 3 * feature) | {"norm.weight": (hidden,)}
    shapes |= {} if "nolmhead" in name else linear("lm_head", drafts, hidden)
    shapes |= layer_shapes(first, fields, 2 * hidden, kind, "hidden_norm", "input_layernorm")
    for layer in range(1, fields["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{layer}", fields, hidden, kind, "input_layernorm")
    shapes |= {f"fc_norm.{index}.weight": (feature,) for index in range(3)} if fields.get("fc_norm") else {}
    shapes |= {"input_norm.weight": (3 * feature,)} if fields.get("norm_before_fc") else {}
    shapes |= {"mask_hidden": (1, 1, 3 * feature)} if is_p_eagle else {}
    has_embedding = is_p_eagle or feature != hidden or "speculators_model_type" in fields
    return shapes | ({"embed_tokens.weight": (VOCAB, hidden)} if has_embedding else {})


def tensors_of(name: str, config: dict[str, Any]) -> Tensors:
    """Make random tensors as the class of a head has them, spread enough that attention matters."""
    fields = config | config.get("transformer_layer_config", {})
    kind = kind_of(name)
    if "block_size" in fields:
        shapes = block_shapes(fields, kind)
    elif "draft_vocab_size" in fields:
        shapes = eagle3_shapes(name, fields, kind)
    else:
        hidden = fields["hidden_size"]
        shapes = {"embed_tokens.weight": (VOCAB, hidden)} | linear("fc", hidden, 2 * hidden, fields["bias"])
        shapes |= layer_shapes("layers.0", fields, hidden, kind)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 + float(key.endswith("norm.weight"))
        for key, shape in shapes.items()
    }
    drafts = fields.get("draft_vocab_size") or VOCAB
    if drafts < VOCAB or "fullvocab" in name:
        tensors["d2t"] = torch.arange(drafts) * (VOCAB // drafts - 1)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(
            0, torch.arange(0, VOCAB, VOCAB // drafts), True
        )
    return tensors


def target_of(config: dict[str, Any]) -> Any:
    hidden = config.get("target_hidden_size") or 64
    return tiny_config("qwen3", 12, VOCAB, hidden_size=hidden, intermediate_size=64)


def load_head(name: str, folder: Path, published, given: dict[str, Any] | None = None) -> DrafterCheckpoint:
    config = shrunk(CONFIGS[name])
    return load_drafter(published.save(folder, config, tensors_of(name, config)), target_of(config), given)


# Fields that a user has to give, in the order of their errors, with words of the sentence.
GIVEN: dict[str, dict[str, tuple[Any, str]]] = {
    "kimi-eagle3-mla": {IDS: ([2, 6, 9], "ascending"), CONVENTION: ("entering", "as vLLM reads")},
    "nvidia-gptoss-longctx-nolmhead": {CONVENTION: ("output", "Model-Optimizer")},
    "nvidia-gptoss-null-nolmhead": {CONVENTION: ("output", "Model-Optimizer")},
    "specforge-gptoss": {CONVENTION: ("output", "SpecForge")},
    "specforge-peagle-nomask": {"mask_token_id": (0, "SpecForge trains with the pad token")},
}
OUTPUTS = (
    "nvidia-gptoss-null-nolmhead",
    "jetspec-qwen3",
    "jetspec-nemo",
    "zlab-dflash-qwen3",
    "zlab-dflash-swa",
    "specforge-dspark",
    "nvidia-gptoss-longctx-nolmhead",
    "specforge-gptoss",
)
FEATURES = dict.fromkeys(OUTPUTS, (2, 6, 10))  # what leaves layers 1, 5 and 9
CAUSAL = {"zlab-dflash-swa": (0,), "speculators9-dspark": (0,), "speculators9-dflash": (0, 1)}
CAUSAL |= {"jetspec-qwen3": (0, 1), "jetspec-nemo": (0, 1)}
FEATURES |= {"nvidia-gptoss-last-boundary": (8, 10, 12), "zlab-dflash-noids": (2, 10)}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_head_loads_or_asks_for_one_field(name: str, tmp_path: Path, published):
    given: dict[str, Any] = {}
    for field, (value, words) in GIVEN.get(name, {}).items():
        with pytest.raises(InputError) as caught:
            load_head(name, tmp_path, published, given)
        assert caught.value.name == f"{field} in {tmp_path / 'config.json'}"
        assert words in caught.value.allowed
        assert "\n" not in str(caught.value)
        given[field] = value
    head = load_head(name, tmp_path, published, given)
    config = head.config
    assert config.feature_layers == (() if config.kind == "eagle" else FEATURES.get(name, (2, 6, 9)))
    kind = kind_of(name)
    assert config.model.family == ("deepseek_v3" if kind == "latent" else kind)
    assert getattr(config, "causal_layers", ()) == CAUSAL.get(name, ())


@pytest.mark.by_default("kimi-eagle3-mla", "nvidia-gptoss-last-boundary", "speculators9-eagle3", "speculators9-dspark")
@pytest.mark.parametrize("name", CONFIGS)
def test_rounds_of_a_published_head_are_the_oracles(name: str, tmp_path: Path, published):
    """The reference drafts as the oracle does, and the fast implementation as the reference."""
    given = {field: value for field, (value, _) in GIVEN.get(name, {}).items()}
    head = load_head(name, tmp_path, published, given)
    target = random_target(target_of(shrunk(CONFIGS[name])))
    doubles = {key: x.double() if x.is_floating_point() else x for key, x in head.tensors.items()}
    pair = Pair(target, replace(head, tensors=doubles), None, name)
    cell = cell_of(dict(topk=2, num_steps=3, num_draft_tokens=6, page_size=4, batch=2))
    found = check(replace(cell, rounds=2), pair=pair)
    assert (found.first_divergence, found.is_empty) == (None, False)
