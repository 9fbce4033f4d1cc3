"""Frozen targets of training, from checkpoints of transformers' Llama.

B windows · C columns (tokens) of a window · V vocabulary · H hidden · F features · K key-value heads · D head dim
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.utils import logging

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError, require, require_choice

CONVENTIONS = ("entering", "output")  # two ways in which a head's config counts feature layers


@dataclass(frozen=True, slots=True)
class TargetReading:
    """A target's outputs that drafters read."""

    hidden_BCH: torch.Tensor  # input of lm_head
    features_BCF: torch.Tensor  # hidden states of the feature layers
    logits_BCV: torch.Tensor
    keys_BKCD: torch.Tensor  # the last layer's, with rope
    values_BKCD: torch.Tensor  # the last layer's

    def prob(self, vocabulary: torch.Tensor | None) -> torch.Tensor:
        """Restrict the target's distribution to a vocabulary of drafts, ids of the target [D]: f32 [B, C, D]."""
        logits = self.logits_BCV if vocabulary is None else self.logits_BCV[..., vocabulary]
        return logits.softmax(-1, dtype=torch.float32)


@check_arguments
def load_target(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """Load a frozen target; in float32 it has the values that its bfloat16 file holds."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError("device", str(device), "a device of this machine that torch can use") from error
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    nn.Module.to(model, device)  # the same as model.to, which transformers hides from type checkers
    return model.eval().requires_grad_(False)


@check_arguments
def feature_states(hidden_states: Sequence[Any], layers: Sequence[int], convention: str) -> list[Any]:
    """Choose the hidden states that a head reads, in the order of its layer ids.

    hidden_states: transformers' tuple; entry i enters layer i, so entry 0 is the embedding. convention: "entering" for
    ids of the layers that a state enters, "output" for ids of the layers that it leaves.
    """
    require_choice("convention", convention, CONVENTIONS)
    offset = 1 if convention == "output" else 0
    num_layers = len(hidden_states) - offset
    require(all(0 <= layer < num_layers for layer in layers), "layers", layers, f"ids from 0 to {num_layers - 1}")
    return [hidden_states[layer + offset] for layer in layers]


@check_arguments
@torch.no_grad()
def read_target(
    target: LlamaForCausalLM,
    tokens_BC: torch.Tensor,
    layers: Sequence[int],
    choose: Callable[..., list[torch.Tensor]] = feature_states,
) -> TargetReading:
    """Run the target once; `layers` are named by the hidden state that enters them."""
    output = target.model(input_ids=tokens_BC, output_hidden_states=True, use_cache=True)
    hidden_BCH = output.last_hidden_state
    states = choose(output.hidden_states, layers, "entering")
    features_BCF = torch.cat(states, -1) if states else hidden_BCH[..., :0]
    last = output.past_key_values.layers[-1]
    return TargetReading(hidden_BCH, features_BCF, target.lm_head(hidden_BCH), last.keys, last.values)
