"""Synthetic pairs: every kind of drafter has the tensors of its layout, and drafts what its target says."""

import pytest
import torch

from specsim.core.errors import InputError
from specsim.core.kinds import TESTED
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.llama_layer import llama_layer
from specsim.models.synthetic_pair import synthetic_pair
from specsim.models.tiny_config import tiny_config

KINDS = [name for name, kind in TESTED.items() if kind.has_weights]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_drafters_have_the_tensors_of_their_layout(kind: str, family: str):
    pair = synthetic_pair(kind, family, num_layers=4, window=7 if family == "mistral" else None)
    assert pair.drafter.config.kind == TESTED[kind].name
    required, optional = drafter_layout(pair.drafter.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in pair.drafter.tensors.items()}
    assert required.items() <= shapes.items() <= (required | optional).items()
    window = 5 if kind.endswith(".window") else pair.target.config.window(0)
    assert pair.drafter.config.model.window(0) == window


@pytest.mark.parametrize("kind", ["frozen-kv", "standalone"])
def test_synthetic_drafters_read_the_embedding_through_the_head(kind: str):
    """Without layers a drafter of either kind proposes what a target without layers does."""
    pair = synthetic_pair(kind, noise=0.0)
    tensors = pair.drafter.tensors
    embedding = pair.target.tensors["model.embed_tokens.weight"]
    hidden = tensors.get("model.embed_tokens.weight")
    if kind == "frozen-kv":
        both = torch.cat([embedding, torch.zeros_like(embedding)], dim=1)
        hidden = both @ tensors["pre_projection.weight"].T
    target_logits = (embedding * pair.target.tensors["model.norm.weight"]) @ pair.target.tensors["lm_head.weight"].T
    assert torch.allclose(hidden @ tensors["lm_head.weight"].T, target_logits, rtol=0, atol=1e-12)


def test_a_llama_layer_of_latent_attention_has_half_its_heads():
    latent = tiny_config("deepseek_v3", hidden_size=24).layers[0]
    heads = llama_layer(latent, 24).attention
    count = latent.attention.num_heads
    assert (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads * heads.head_dim) == (count, count // 2, 24)


@pytest.mark.parametrize(("window", "expected"), [(None, 5), (3, 3)])
def test_every_other_tiny_gpt_oss_layer_has_a_window(window, expected):
    assert tiny_config("gpt_oss", 4, window=window).sliding_windows == (expected, None, expected, None)


def test_fields_of_a_synthetic_drafter():
    config = synthetic_pair("mtp", fields={"hidden_chain": False}).drafter.config
    assert (config.hidden_chain, config.num_modules, config.model.num_layers) == (False, 3, 3)
    flags = synthetic_pair("eagle3.1", num_layers=4).drafter.config
    assert (flags.norm_before_fc, flags.fc_norm, flags.norm_output) == (True, True, True)
    assert (flags.feature_layers, flags.model.num_layers) == ((0, 1, 2, 3, 4), 2)


def test_an_unknown_kind_of_synthetic_drafter():
    with pytest.raises(InputError, check=lambda error: error.name == "kind"):
        synthetic_pair("medusa")
