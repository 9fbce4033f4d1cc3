"""Standalone drafter: a smaller language model with the target's tokenizer."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specsim.maintain.training.recipe import Recipe
from specsim.maintain.training.student import Reading, Student


class Standalone(Student):
    """A Llama with a tied embedding, which reads nothing of the target."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.language_model = LlamaForCausalLM(config)

    def unroll(self, reading: Reading, tokens_BC: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Shift the logits of each column: the draft after i true tokens is the prediction at column r + i + 1."""
        rows = tokens_BC.shape[1] - steps
        logits_BCV = self.language_model(input_ids=tokens_BC, use_cache=False).logits
        return [logits_BCV[:, step + 1 : step + 1 + rows] for step in range(steps)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give a language model's names; the tied lm_head has no tensor of its own."""
        state = nn.Module.state_dict(self.language_model)
        return {name: value for name, value in state.items() if name != "lm_head.weight"}


def build_standalone(target: LlamaForCausalLM, recipe: Recipe) -> Standalone:
    """Build a model from the target's embedding, final norm and evenly spaced layers, which training starts from."""
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": recipe.standalone_layers})
    student = Standalone(config)
    chosen = torch.linspace(0, target.config.num_hidden_layers - 1, recipe.standalone_layers).round().int().tolist()
    pairs = [
        (student.language_model.model.embed_tokens, target.model.embed_tokens),
        (student.language_model.model.norm, target.model.norm),
        *zip(student.language_model.model.layers, (target.model.layers[index] for index in chosen), strict=True),
    ]
    for own, source in pairs:
        nn.Module.load_state_dict(own, source.state_dict())
    return student
