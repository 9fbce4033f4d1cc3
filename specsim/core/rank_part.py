"""The part of a model that one rank holds, for readers of checkpoints and the fast implementation.

Heads and MLP channels are divided along the outputs of the projections that make them and along the inputs of those
that read them. Embedding and head are divided by tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from specsim.core.errors import InputError, require
from specsim.core.kv_buffer import KVLayout
from specsim.core.layer_config import DenseMLP, HeadAttention, LayerConfig
from specsim.core.target import ModelConfig

# Slices begin at multiples of one of these, as groups of tokens do that the fast implementation summarises.
BLOCKS = (256, 16, 1)  # tokens
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_INPUTS = ("o_proj", "down_proj")  # whose results are summed over ranks
TABLES = ("model.embed_tokens.weight", "lm_head.weight")  # of a target, divided by tokens
DRAFTER_TABLES = ("lm_head.weight",)


class Span(NamedTuple):
    """A slice of a tensor along one dimension."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RankPart:
    """The slices of one rank."""

    rank: int
    size: int

    def chunk(self, vocab_size: int) -> int:
        """Count the tokens of every slice of a vocabulary but the last ones, which may have fewer."""
        block = next(each for each in BLOCKS if vocab_size >= each * self.size or each == 1)
        return -(-vocab_size // (self.size * block)) * block

    def tokens(self, vocab_size: int) -> range:
        """List the tokens of this rank's slice."""
        chunk = self.chunk(vocab_size)
        return range(min(self.rank * chunk, vocab_size), min((self.rank + 1) * chunk, vocab_size))

    def span(self, name: str, shape: tuple[int, ...], tables: Iterable[str] = TABLES) -> Span | None:
        """Find this rank's slice of a tensor, None where it holds the whole.

        A bias of a sum over ranks is added by rank 0 alone; others have an empty slice of it.
        """
        part, _, kind = name.rpartition(".")
        part = part.rpartition(".")[2]
        if name in tables:
            tokens = self.tokens(shape[0])
            return Span(0, tokens.start, tokens.stop)
        if part in BY_INPUTS and kind == "bias":
            return Span(0, 0, shape[0] if self.rank == 0 else 0)
        if part in BY_OUTPUTS or part in BY_INPUTS:
            dim = 0 if part in BY_OUTPUTS else 1
            require(shape[dim] % self.size == 0, "tensor_parallel", self.size, f"a divisor of {shape[dim]} in {name}")
            width = shape[dim] // self.size
            return Span(dim, self.rank * width, (self.rank + 1) * width)
        return None

    def tensors(self, whole: Mapping[str, torch.Tensor], tables: Iterable[str] = TABLES) -> dict[str, torch.Tensor]:
        """Take this rank's slices, without empty ones."""
        own: dict[str, torch.Tensor] = {}
        for name, tensor in whole.items():
            span = self.span(name, tuple(tensor.shape), tables)
            cut = tensor if span is None else tensor.narrow(span.dim, span.start, span.stop - span.start)
            if cut.numel() or name in tables:
                own[name] = cut
        return own

    def padded(self, head_CH: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Append rows of zeros to a slice of a head, so that all ranks' slices have the same size."""
        return torch.nn.functional.pad(head_CH, (0, 0, 0, self.chunk(vocab_size) - len(head_CH)))

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Make the shape of this rank's layers; vocabulary and hidden size are the whole model's."""
        return replace(whole, layers=tuple(map(self._layer, whole.layers)))

    def _layer(self, layer: LayerConfig) -> LayerConfig:
        own, mlp = layer.attention, layer.mlp
        if not isinstance(own, HeadAttention) or not isinstance(mlp, DenseMLP) or own.has_sinks:
            allowed = "1 for a model with experts, latent attention or attention sinks"
            raise InputError("tensor_parallel", self.size, allowed)
        sizes = {"key-value heads": own.num_kv_heads, "heads": own.num_heads, "MLP channels": mlp.size}
        for name, size in sizes.items():
            require(size % self.size == 0, "tensor_parallel", self.size, f"a divisor of the {size} {name}")
        heads = replace(own, num_heads=own.num_heads // self.size, num_kv_heads=own.num_kv_heads // self.size)
        return LayerConfig(heads, replace(mlp, size=mlp.size // self.size))


def kv_layout_of(config: ModelConfig, part: RankPart | None) -> KVLayout:
    """Shape of the KV of a model, or of a rank's heads of it where `config` is that rank's."""
    layout = config.kv_layout
    return layout if part is None else replace(layout, first_head=part.rank * layout.num_kv_heads)
