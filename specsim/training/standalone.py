"""Standalone drafter: a smaller language model with the target's tokenizer."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specsim.training.drafter import DrafterModule, Drafts, Roots, drafts_of_rows
from specsim.training.options import TrainingOptions
from specsim.training.target import TargetReading


class Standalone(DrafterModule):
    """A Llama with a tied embedding, which reads nothing of the target."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.language_model = LlamaForCausalLM(config)

    def drafts(self, reading: TargetReading, tokens_BC: torch.Tensor, roots: Roots, num_drafts: int) -> list[Drafts]:
        """Shift the logits of each column: the draft after i true tokens is the prediction at column r + i + 1."""
        num_rows = tokens_BC.shape[1] - num_drafts
        logits_BCV = self.language_model(input_ids=tokens_BC, use_cache=False).logits
        return drafts_of_rows([logits_BCV[:, step + 1 : step + 1 + num_rows] for step in range(num_drafts)])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give a language model's names; the tied lm_head has no tensor of its own."""
        state = nn.Module.state_dict(self.language_model)
        return {name: value for name, value in state.items() if name != "lm_head.weight"}


def build_standalone(target: LlamaForCausalLM, tokens: torch.Tensor, options: TrainingOptions) -> Standalone:
    """Build a model from the target's embedding, final norm and evenly spaced layers, which training starts from."""
    num_layers = options.num_layers
    fields = {"num_hidden_layers": num_layers, "tie_word_embeddings": True}
    model = Standalone(LlamaConfig(**{**target.config.to_dict(), **fields}))
    layers = torch.linspace(0, target.config.num_hidden_layers - 1, num_layers).round().int().tolist()
    pairs = [
        (model.language_model.model.embed_tokens, target.model.embed_tokens),
        (model.language_model.model.norm, target.model.norm),
        *zip(model.language_model.model.layers, (target.model.layers[layer] for layer in layers), strict=True),
    ]
    for module, source in pairs:
        nn.Module.load_state_dict(module, source.state_dict())
    return model
