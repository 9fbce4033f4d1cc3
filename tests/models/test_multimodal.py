"""Language models in multimodal checkpoints, and fields that state what a family does anyway."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, Mistral3Config

from specsim.core.errors import InputError
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.loading import load_target
from specsim.models.checkpoint.model_config import model_config
from specsim.reference.oracle_forward import in_dtype, target_forward
from specsim.simulator.model import model

TEXT = {
    "model_type": "mistral", "vocab_size": 40, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-5, "sliding_window": None,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "head_dim": 4, "image_size": 28, "patch_size": 14,
}  # fmt: skip


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_language_model_of_a_multimodal_checkpoint_is_read(is_tied, tmp_path):
    """Its logits are those of transformers; names as in published files, images' tensors left out."""
    theirs = AutoModelForImageTextToText.from_config(
        Mistral3Config(text_config=TEXT, vision_config=VISION, image_token_index=39, tie_word_embeddings=is_tied)
    )
    theirs.config.save_pretrained(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    if is_tied:
        del tensors["lm_head.weight"]
    names = {name: name.replace("model.language_model.", "language_model.model.") for name in tensors}
    names |= {"lm_head.weight": "language_model.lm_head.weight"}
    save_file({names[name]: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    target = in_dtype(load_target(tmp_path), torch.float64)
    token_ids = [5, 9, 7, 30, 3]
    with torch.inference_mode():
        expected_TV = theirs.double().eval()(input_ids=torch.tensor([token_ids])).logits[0]
        logits_TV = target_forward(target.config, target.tensors, token_ids, ())[0]
    assert torch.allclose(logits_TV, expected_TV, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "name", "value", "other"),
    [
        ("qwen3", "use_qk_norm", True, None),
        ("llama", "query_pre_attn_scalar", 6, 5),
        ("llama", "attention_multiplier", 6**-0.5, 0.5),
        ("llama", "no_rope_layers", [1, 1, 1, 1], [1, 1, 1, 0]),
    ],
)
def test_a_field_that_states_what_is_done_anyway_is_accepted(family, name, value, other, published):
    fields = published.small(family)
    plain = model_config(Fields(Path("config.json"), fields))
    assert model_config(Fields(Path("config.json"), fields | {name: value})) == plain
    if other is not None:
        with pytest.raises(InputError, match=f"{name} in config.json is .*; allowed: absent in a {family} model"):
            model_config(Fields(Path("config.json"), fields | {name: other}))


def test_use_qk_norm_and_experts_of_another_family_are_refused(published):
    for change in ({"use_qk_norm": True}, {"moe_intermediate_size": 12, "num_experts": 4}):
        with pytest.raises(InputError, match="absent in a llama model"):
            model_config(Fields(Path("config.json"), published.small("llama", **change)))


def test_the_simulator_fills_sizes_by_the_familys_defaults():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    found = model({"model_type": "gemma3", "text_config": text})
    assert (found.vocab_size, found.hidden_size, len(found.layers)) == (262208, 2560, len(found.layers))
    assert sum(group.count for group in found.layers) == 34
    with pytest.raises(InputError, match="vocab_size is None"):
        model({"model_type": "nobody", "hidden_size": 64, "num_hidden_layers": 2})
