"""Tensors that drafters need, by name and shape."""

from dataclasses import replace

import pytest

from specsim.core.eagle import Eagle3Config, PEagleConfig
from specsim.core.errors import InputError
from specsim.core.frozen_kv import FrozenKVConfig
from specsim.core.mtp import MtpConfig
from specsim.core.standalone import StandaloneConfig
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.checkpoint.layout import target_layout
from specsim.models.tiny_config import tiny_config

NARROW = tiny_config(num_layers=2, hidden_size=24)


def test_an_mtp_module_has_its_own_layer():
    required, optional = drafter_layout(MtpConfig(tiny_config(num_layers=2), 48, 32, num_modules=2))
    first = {name: shape for name, shape in required.items() if name.startswith("modules.0.")}
    assert required == first | {name.replace("modules.0.", "modules.1."): shape for name, shape in first.items()}
    assert not optional
    norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "norm")
    attention = {"q_proj": (64, 32), "k_proj": (32, 32), "v_proj": (32, 32), "o_proj": (32, 64)}
    mlp = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    expected = {f"{name}.weight": (32,) for name in norms} | {"eh_proj.weight": (32, 64)}
    expected |= {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
    expected |= {f"mlp.{name}.weight": shape for name, shape in mlp.items()}
    assert first == {f"modules.0.{name}": shape for name, shape in expected.items()}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_drafter_on_frozen_kv_has_queries_only(family: str):
    required, _ = drafter_layout(FrozenKVConfig(tiny_config(family, num_layers=2, hidden_size=24), 48, 32))
    assert (required["pre_projection.weight"], required["post_projection.weight"]) == ((24, 64), (32, 24))
    assert (required["norm.weight"], required["lm_head.weight"]) == ((24,), (48, 24))
    attention = {name.split(".")[3] for name in required if "self_attn" in name}
    assert attention == {"q_proj", "o_proj"} | ({"q_norm"} if family == "qwen3" else set())
    assert required["layers.1.self_attn.q_proj.weight"] == (64, 24)


def test_a_standalone_drafter_has_the_names_of_a_target():
    tables = {"d2t": (48,), "t2d": (48,)}
    assert drafter_layout(StandaloneConfig(NARROW, 48, 32)) == (target_layout(NARROW), tables)
    bridged, _ = drafter_layout(StandaloneConfig(NARROW, 40, 32))
    assert (bridged["lm_head.weight"], bridged["d2t"]) == ((40, NARROW.hidden_size), (40,))


def test_norms_of_eagle3_features():
    config = Eagle3Config(NARROW, 48, 32, (0, 1, 2, 3))
    plain, _ = drafter_layout(config)
    assert plain["fc.weight"] == (24, 128)
    together, _ = drafter_layout(replace(config, norm_before_fc=True))
    assert together == plain | {"input_norm.weight": (128,)}
    apart, _ = drafter_layout(replace(config, fc_norm=True))
    assert apart == plain | {f"fc_norm.{index}.weight": (32,) for index in range(4)}


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (MtpConfig, "num_modules", 0),
        (MtpConfig, "boundary", "first"),
        (FrozenKVConfig, "position", "first"),
        (StandaloneConfig, "rows", "first"),
        (PEagleConfig, "mask_token_id", NARROW.vocab_size),
    ],
)
def test_drafter_shapes_refused(make: type, field: str, value: object):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (field, value)):
        make(NARROW, 48, 32, **{field: value})
