"""Frozen targets, and their EAGLE heads: untrained, with the target's own last layer to start from, and in files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from specsim.core.files import write_whole
from specsim.training.heads import UnrolledEagle3Head, UnrolledEagleHead, UnrolledHead


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of a head that its target does not fix."""

    draft_vocab_size: int  # of EAGLE-3
    intermediate_size: int
    feature_layers: tuple[int, ...]  # target layers whose entering hidden states EAGLE-3 reads


def head_config(name: str, target: LlamaForCausalLM, sizes: HeadSizes) -> LlamaConfig:
    """Build a drafter's configuration: its target's, with one layer and its own fields."""
    fields = {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
    if name == "eagle3":
        fields = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": sizes.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(sizes.feature_layers),
            "eagle_aux_hidden_state_convention": "entering",
            "norm_before_residual": False,
        }
    shape = {"num_hidden_layers": 1, "intermediate_size": sizes.intermediate_size, "tie_word_embeddings": False}
    return LlamaConfig(**{**target.config.to_dict(), **shape, **fields})


def build_head(name: str, target: LlamaForCausalLM, tokens: torch.Tensor, sizes: HeadSizes) -> UnrolledHead:
    """Build an untrained head; EAGLE-3's vocabulary is the training text's most frequent ids, in ascending order."""
    config = head_config(name, target, sizes)
    if name == "eagle":
        return UnrolledEagleHead(config, target.lm_head).to(tokens.device)
    frequency = torch.bincount(tokens, minlength=config.vocab_size)
    draft_ids = frequency.argsort(descending=True, stable=True)[: sizes.draft_vocab_size].sort().values
    return UnrolledEagle3Head(config, target.model.embed_tokens, draft_ids).to(tokens.device)


@torch.no_grad()
def copy_last_layer(head: UnrolledEagle3Head, target: LlamaForCausalLM) -> None:
    """Start an EAGLE-3 head from its target's last layer and norm, which learns faster than random values.

    The head reads the last of its features, and not yet the token. An MLP of another size stays random.
    """
    layer: Any = target.model.layers[-1]
    midlayer = head.midlayer
    wide = head.config.hidden_size
    head.fc.weight.zero_()[:, -wide:] = torch.eye(wide, device=head.fc.weight.device)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(midlayer.self_attn, name).weight
        weight[:, wide:] = getattr(layer.self_attn, name).weight
    midlayer.self_attn.o_proj.load_state_dict(layer.self_attn.o_proj.state_dict())
    midlayer.hidden_norm.load_state_dict(layer.input_layernorm.state_dict())
    midlayer.post_attention_layernorm.load_state_dict(layer.post_attention_layernorm.state_dict())
    head.norm.load_state_dict(target.model.norm.state_dict())
    if head.config.intermediate_size == target.config.intermediate_size:
        midlayer.mlp.load_state_dict(layer.mlp.state_dict())


def write_head(head: UnrolledHead, folder: Path) -> None:
    """Write a head in bfloat16, and leave in it the values written."""
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()
    head.config.dtype = torch.bfloat16
    head.config.save_pretrained(folder)
    state = head.state_dict()
    tensors = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
    write_whole(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}), "folder")


def read_eagle3(folder: Path, target: LlamaForCausalLM) -> UnrolledEagle3Head:
    """Read an EAGLE-3 head that `write_head` wrote, in float32."""
    config = LlamaConfig.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    draft_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    head = UnrolledEagle3Head(config, target.model.embed_tokens, draft_ids)
    floats = {name: value.float() for name, value in tensors.items() if value.is_floating_point()}
    head.load_state_dict(tensors | floats)
    nn.Module.requires_grad_(head, False)
    return head


def load_target(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """Load a frozen target; in float32 it has the values that its bfloat16 file holds."""
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    nn.Module.to(model, device)  # the same as model.to, which transformers hides from type checkers
    return model.eval().requires_grad_(False)
