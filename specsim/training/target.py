"""Frozen targets of training, from checkpoints of transformers' Llama."""

from pathlib import Path

import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.utils import logging


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
