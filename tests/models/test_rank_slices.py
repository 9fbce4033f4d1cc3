"""Slices of a checkpoint, as one rank reads them."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from specsim import InputError, load
from specsim.core.rank_part import DRAFTER_TABLES, TABLES, RankPart
from specsim.models.load import Parts

SIZES = {
    "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
OF_FAMILY = {
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 32}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "q_lora_rank": 24,
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "moe_intermediate_size": 32, "num_key_value_heads": 4, "head_dim": 8, "num_nextn_predict_layers": 0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "mtp"])
def test_slices_that_are_read_are_those_of_the_whole(drafter):
    whole = load(drafter=drafter)
    for rank in range(2):
        part = RankPart(rank, 2)
        own = load(drafter=drafter, parts=Parts(part, part))
        assert own.checkpoint is not None
        assert whole.checkpoint is not None
        for checkpoint, whole_one, tables in (
            (own.target, whole.target, TABLES),
            (own.checkpoint, whole.checkpoint, DRAFTER_TABLES),
        ):
            expected = part.tensors(whole_one.tensors, tables)
            assert expected.keys() == checkpoint.tensors_of(part).keys()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint.tensors.items())


FORMS = (
    ("gpt_oss", "stacked"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "stacked"), ("qwen3_moe", "single"),
    ("deepseek_v3", "single"),
)  # fmt: skip


def written(folder, family, form):
    """Write a random checkpoint: as transformers has it, with a tensor for every expert, or as GPT-OSS is released."""
    name, fields = OF_FAMILY[family]
    config = getattr(transformers, name)(**SIZES | fields, architectures=["x"])
    model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {key: torch.randn(tensor.shape) for key, tensor in model.state_dict().items()}
    for key in [key for key in tensors if ".experts." in key]:
        module, _, projection = key.rpartition(".")
        if form == "single":
            for expert, matrix in enumerate(tensors.pop(key)):
                parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    tensors[f"{module}.{expert}.{part}.weight"] = rows.contiguous()
        elif form == "mxfp4" and not projection.endswith("bias"):
            experts, columns, rows = tensors.pop(key).shape
            tensors[f"{key}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{key}_scales"] = torch.randint(118, 128, (experts, rows, columns // 32), dtype=torch.uint8)
    saved = config.to_dict()
    if form == "mxfp4":
        saved["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(saved))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_slices_of_experts_are_those_of_the_whole(tmp_path, family, form):
    """Whatever the checkpoint's format, a rank reads some channels of every expert."""
    written(tmp_path, family, form)
    whole = load(tmp_path, drafter="none").target
    for rank in range(2):
        part = RankPart(rank, 2)
        own = load(tmp_path, drafter="none", parts=Parts(part)).target
        expected = part.tensors(whole.tensors)
        assert expected.keys() == own.tensors_of(part).keys()
        for name, tensor in own.tensors_of(part).items():
            assert torch.equal(tensor, expected[name]), name
            assert "down_proj" not in name or tensor.numel() < whole.tensors[name].numel() or name.endswith("bias")


def test_no_slice_keeps_the_memory_of_a_whole_tensor():
    """Tensors that a rank reads have no more memory than its slices."""
    part = RankPart(0, 2)
    own = load(drafter="eagle3", parts=Parts(part, part)).target
    for tensor in own.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_slices_of_another_rank_raise():
    pair = load(drafter="none", parts=Parts(RankPart(0, 2)))
    with pytest.raises(InputError, check=lambda error: error.name == "pair"):
        pair.target.tensors_of(RankPart(1, 2))


def test_a_pickle_has_no_slices(tmp_path):
    from specsim.models.checkpoint.weights import Slices, read_weights

    torch.save({"x": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError):
        read_weights(tmp_path, Slices(RankPart(0, 2), TABLES))


def test_a_slice_with_a_value_that_is_not_finite_raises(tmp_path):
    from specsim.models.checkpoint.weights import Slices, by_name, check_layout, read_weights

    tensor = torch.zeros(4, 6)
    tensor[3, 5] = torch.nan
    save_file({"o_proj.weight": tensor}, tmp_path / "model.safetensors")
    layout = {"o_proj.weight": (4, 6)}
    for rank in range(2):
        named = by_name(read_weights(tmp_path, Slices(RankPart(rank, 2), TABLES)), str)
        if rank == 0:
            assert check_layout(named, tmp_path, layout, {})["o_proj.weight"].shape == (4, 3)
        else:
            with pytest.raises(InputError):
                check_layout(named, tmp_path, layout, {})
