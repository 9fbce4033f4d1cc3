"""Target of the pair: a small Llama, trained on windows of the corpus.

B windows a batch · C columns (tokens) of a window · V vocabulary
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specsim.maintain.training.minimise import Budget, minimise
from specsim.maintain.training.recipe import Recipe

PEAK_RATE = 4e-3
VALIDATION_WINDOWS = 256
MAX_LENGTH = 2048


def target_config(recipe: Recipe) -> LlamaConfig:
    """Build the configuration of a recipe's target."""
    return LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def sample_windows(tokens: torch.Tensor, num_windows: int, length: int) -> torch.Tensor:
    """Draw windows [B, C] (int64) of consecutive tokens, anywhere in the corpus."""
    starts = torch.randint(len(tokens) - length, (num_windows, 1), device=tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


def language_loss(model: PreTrainedModel, windows_BC: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, in nats."""
    with torch.autocast(windows_BC.device.type, torch.bfloat16, enabled=windows_BC.is_cuda):
        logits_BCV = model(input_ids=windows_BC[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_BCV.flatten(0, 1).float(), windows_BC[:, 1:].flatten())


def train_target(tokens: torch.Tensor, recipe: Recipe, budget: Budget, folder: Path) -> dict[str, Any]:
    """Train a target and write it to `folder` in bfloat16."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(target_config(recipe))
    nn.Module.to(model, tokens.device)  # the same as model.to, which transformers hides from type checkers
    loss = torch.compile(language_loss) if tokens.is_cuda else language_loss
    spent = minimise(
        lambda: loss(model, sample_windows(tokens, recipe.target_batch, recipe.target_window + 1)),
        model,
        PEAK_RATE,
        budget,
        "target",
    )
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder)
    seen = spent.steps * recipe.target_batch * recipe.target_window
    return {"parameters": model.num_parameters(), **spent._asdict(), "tokens_seen": seen, "tokens": len(tokens)}


@torch.no_grad()
def validation_loss(model: PreTrainedModel, tokens: torch.Tensor, length: int) -> float:
    """Mean loss in nats a token over up to `VALIDATION_WINDOWS` evenly spaced windows."""
    length = min(length, len(tokens) - 1)
    starts = torch.linspace(0, len(tokens) - length - 1, VALIDATION_WINDOWS).long()[:: 1 if tokens.is_cuda else 16]
    losses = [language_loss(model, tokens[start : start + length + 1].long()[None]) for start in starts.tolist()]
    return torch.stack(losses).mean().item()
