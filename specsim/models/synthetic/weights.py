"""Parts of the weights of synthetic pairs, and the shape of small-vocabulary models."""

from dataclasses import replace

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.pair import TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.layout import Layout
from specsim.models.synthetic.drafter import Tensors

# Small-vocabulary models.
VOCAB = 16
CLASSES = 2  # the class of a token is its number modulo 2
HIDDEN = 64
DRAFT = VOCAB + 2 * CLASSES  # first feature of the drafter's embedding


def random_weights(layout: Layout, scale: float, generator: torch.Generator) -> Tensors:
    """Draw normal weights of this scale, and norms around 1 with half of it."""
    tensors = {}
    for name, shape in layout.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = 1 + scale / 2 * values if "norm" in name else scale * values
    return tensors


def blank(layout: Layout) -> Tensors:
    """Make the tensors of a layout: norms are 1, all others 0."""
    return {name: torch.full(shape, float("norm" in name), dtype=torch.float64) for name, shape in layout.items()}


def copy_embedding(projection: torch.Tensor) -> None:
    """Make a projection of embedding and hidden state copy the embedding's features, the first of them twice."""
    width = projection.shape[1] // 2
    row = torch.arange(len(projection))
    projection[row, row % width] += 1.0


def widened(model: ModelConfig) -> ModelConfig:
    """Make hidden states half as wide again, to tell the widths of drafter and target apart."""
    return replace(model, hidden_size=model.hidden_size * 3 // 2, tie_word_embeddings=False)


def widened_head(config: DrafterConfig, target: TargetCheckpoint) -> torch.Tensor:
    """Make a head of the drafter's width that reads what the target's head reads, in the first features."""
    head = target.tensors["lm_head.weight"] * target.tensors["model.norm.weight"]
    return torch.nn.functional.pad(head, (0, config.model.hidden_size - head.shape[1]))


def scale_features(tensors: Tensors, name: str, noise: float) -> None:
    """Scale a projection of the target's features so that its output does not depend on the noise."""
    tensors[name] *= tensors[name].shape[1] ** -0.5 / noise if noise else 0


def match_constant(tensors: Tensors, prefix: str, model: ModelConfig) -> None:
    """Give queries and keys a constant feature, so that rotation makes distance 0 the best match."""
    for name in ("q", "k"):
        tensors[f"{prefix}{name}_proj.weight"][:, 0] += 4.0
        if model.heads.has_head_norms:  # they would take the factor out again
            tensors[f"{prefix}{name}_norm.weight"] *= 4.0


def hand_on_values(tensors: Tensors, prefix: str, model: ModelConfig, values: torch.Tensor, gain: float = 1.0) -> None:
    """Make an attention add `gain` times these values of what it attends to, [H, width of a row]."""
    tensors[f"{prefix}v_proj.weight"][: model.hidden_size] += values
    channel = torch.arange(model.hidden_size)  # of the values, which the first query head of each group reads
    group = model.num_heads // model.num_kv_heads
    column = channel // model.head_dim * group * model.head_dim + channel % model.head_dim
    tensors[f"{prefix}o_proj.weight"][:, column] += gain * torch.eye(model.hidden_size, dtype=torch.float64)
