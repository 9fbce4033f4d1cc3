"""Train an EAGLE head for a target, on corpus text that the target continues itself."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specsim.maintain.training.heads import Eagle3Head, EagleHead, Head
from specsim.maintain.training.minimise import Budget, minimise
from specsim.maintain.training.recipe import Recipe
from specsim.maintain.training.unroll import read_features, unrolled_loss

PEAK_RATE = 4e-3
REGRESSION = {"eagle": 0.2, "eagle3": 0.0}


def head_config(name: str, target: LlamaForCausalLM, recipe: Recipe) -> LlamaConfig:
    """Build a drafter's configuration: its target's, with one layer and its own fields."""
    own = {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
    if name == "eagle3":
        own = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": recipe.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(recipe.feature_layers),
            "eagle_aux_hidden_state_convention": "entering",
            "norm_before_residual": False,
        }
    sizes = {"num_hidden_layers": 1, "intermediate_size": recipe.head_intermediate_size, "tie_word_embeddings": False}
    return LlamaConfig(**{**target.config.to_dict(), **sizes, **own})


def build_head(name: str, target: LlamaForCausalLM, tokens: torch.Tensor, recipe: Recipe) -> tuple[Head, LlamaConfig]:
    """Build an untrained head; EAGLE-3's vocabulary is the training text's most frequent ids, in ascending order."""
    config = head_config(name, target, recipe)
    if name == "eagle":
        return EagleHead(config, target.lm_head).to(tokens.device), config
    frequency = torch.bincount(tokens, minlength=recipe.vocab_size)
    draft_ids = frequency.argsort(descending=True, stable=True)[: recipe.draft_vocab_size].sort().values
    return Eagle3Head(config, target.model.embed_tokens, draft_ids).to(tokens.device), config


def train_head(
    name: str,
    target: LlamaForCausalLM,
    tokens: torch.Tensor,
    rollouts: torch.Tensor,
    recipe: Recipe,
    budget: Budget,
    folder: Path,
) -> tuple[Head, dict[str, Any]]:
    """Train head `name` and write it to `folder` in bfloat16; the head returned holds the written values."""
    torch.manual_seed(2)
    head, config = build_head(name, target, tokens, recipe)

    def loss_of_a_batch() -> torch.Tensor:
        windows_BC = rollouts[torch.randint(len(rollouts), (recipe.head_batch,), device=rollouts.device)].long()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            features = read_features(target, windows_BC, recipe.feature_layers)
            return unrolled_loss(head, features, windows_BC, recipe.num_unrolled, REGRESSION[name])

    spent = minimise(loss_of_a_batch, head, PEAK_RATE, budget, name)
    write_head(head, config, folder)
    coverage = torch.isin(tokens, head.vocabulary).float().mean().item()
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return head, {"parameters": parameters, **spent._asdict(), "coverage": coverage}


def write_head(head: Head, config: LlamaConfig, folder: Path) -> None:
    """Write a head in bfloat16, and leave in it the values written."""
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    state = head.state_dict()
    tensors = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
