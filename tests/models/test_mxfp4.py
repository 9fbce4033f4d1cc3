"""Experts of GPT-OSS in MXFP4, against transformers' conversion."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specsim.core.errors import InputError
from specsim.models.checkpoint import load_target
from specsim.models.checkpoint.expert_tensors import dequantised

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ROWS = {"gate_up_proj": 64, "down_proj": 64}
COLUMNS = {"gate_up_proj": 64, "down_proj": 32}


def packed(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw blocks with every code, and scales from 2^-9 to 2^0."""
    blocks = torch.randint(256, (4, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(118, 128, (4, rows, columns // 32), dtype=torch.uint8)


def test_numbers_are_those_of_transformers():
    blocks, scales = packed(6, 96)
    expected = convert_moe_packed_tensors(blocks, scales).mT  # [experts, columns, rows]
    assert torch.equal(dequantised(blocks, scales, "x"), expected)
    assert len(dequantised(blocks, torch.full_like(scales, 127), "x").unique()) == 15  # 0 and -0 are equal


@pytest.fixture
def folders(tmp_path):
    """Save one model twice: as transformers holds it, and with experts in MXFP4 as it is released."""
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **OTHERS)).bfloat16()
    plain, released = tmp_path / "plain", tmp_path / "released"
    model.save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    of_release = dict(tensors)
    for name in tensors:
        projection = name.rpartition(".")[2]
        if projection in ROWS:
            blocks, scales = packed(ROWS[projection], COLUMNS[projection])
            tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
            del of_release[name]
            of_release |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    assert len(of_release) == len(tensors) + 4
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    released.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (released / "config.json").write_text(json.dumps(config))
    save_file(of_release, released / "model.safetensors", {"format": "pt"})
    return plain, released


def test_a_released_checkpoint_is_the_converted_one(folders):
    plain, released = (load_target(folder) for folder in folders)
    assert plain.config == released.config
    assert plain.tensors.keys() == released.tensors.keys()
    for name, tensor in plain.tensors.items():
        assert torch.equal(tensor, released.tensors[name]), name


@pytest.mark.parametrize("change", ["without scales", "wrong shape", "wrong type"])
def test_damaged_blocks_are_refused_by_name(folders, change):
    file = folders[1] / "model.safetensors"
    tensors = load_file(file)
    blocks = "model.layers.1.mlp.experts.down_proj_blocks"
    if change == "without scales":
        del tensors[blocks.replace("blocks", "scales")]
    elif change == "wrong shape":
        tensors[blocks] = tensors[blocks][:, :, :, :8].contiguous()
    else:
        tensors[blocks] = tensors[blocks].int()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, check=lambda error: blocks in error.name):
        load_target(folders[1])
