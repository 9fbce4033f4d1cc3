"""The part of a model that one rank holds, for readers of checkpoints and the fast implementation.

Heads and MLP channels, those of every expert too, are divided along the outputs of the projections that make them and
along the inputs of those that read them. Embedding and head are divided by tokens. Routers and projections to latent
vectors are whole on every rank.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from specsim.core.errors import require
from specsim.core.kv_buffer import KVLayout
from specsim.core.target import MLP, Attention, DenseMLP, LatentAttention, LayerConfig, ModelConfig

# Slices begin at multiples of one of these, as groups of tokens do that the fast implementation summarises.
BLOCKS = (256, 16, 1)  # tokens
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj")
BY_INPUTS = ("o_proj", "down_proj")  # whose results are summed over ranks
TABLES = ("model.embed_tokens.weight", "lm_head.weight")  # of a target, divided by tokens
DRAFTER_TABLES = ("lm_head.weight",)


class Span(NamedTuple):
    """A slice of each of some equal parts of a tensor, along one dimension."""

    dim: int
    start: int
    stop: int
    parts: int = 1  # 2: gates before ups

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the slice, a view where there is one part."""
        size = self.stop - self.start
        slices = [part.narrow(self.dim, self.start, size) for part in tensor.chunk(self.parts, self.dim)]
        return slices[0] if self.parts == 1 else torch.cat(slices, self.dim)


@dataclass(frozen=True, slots=True)
class RankPart:
    """The slices of one rank."""

    rank: int
    size: int

    def chunk(self, vocab_size: int) -> int:
        """Count the tokens of every slice of a vocabulary but the last ones, which may have fewer."""
        block = next(tokens for tokens in BLOCKS if vocab_size >= tokens * self.size or tokens == 1)
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
        if name.endswith("self_attn.sinks"):
            return self.divided(name, shape, 0)
        stacked = ".experts." in f".{name}" and len(shape) == (2 if kind == "bias" else 3)  # all experts in one tensor
        if part in BY_OUTPUTS:
            return self.divided(name, shape, int(stacked), parts=2 if part == "gate_up_proj" else 1)
        if part not in BY_INPUTS:
            return None
        return self.of_rank_0(shape) if kind == "bias" else self.divided(name, shape, 1 + stacked)

    def divided(self, name: str, shape: tuple[int, ...], dim: int, parts: int = 1) -> Span | None:
        """Divide a dimension, or each of equal parts of it, evenly; None where the tensor has no such dimension."""
        if dim >= len(shape):
            return None
        size = shape[dim] // parts
        require(size % self.size == 0, "tensor_parallel", self.size, f"a divisor of {size} in {name}")
        width = size // self.size
        return Span(dim, self.rank * width, (self.rank + 1) * width, parts)

    def of_rank_0(self, shape: tuple[int, ...]) -> Span:
        """Give the whole tensor to rank 0, and an empty slice to the others."""
        return Span(0, 0, shape[0] if self.rank == 0 else 0)

    def tensors(self, tensors: Mapping[str, torch.Tensor], tables: Iterable[str] = TABLES) -> dict[str, torch.Tensor]:
        """Take this rank's slices, without empty ones."""
        slices: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            span = self.span(name, tuple(tensor.shape), tables)
            cut = tensor if span is None else span.of(tensor)
            if cut.numel() or name in tables:
                slices[name] = cut
        return slices

    def padded(self, head_CH: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Append rows of zeros to a slice of a head, so that all ranks' slices have the same size."""
        return torch.nn.functional.pad(head_CH, (0, 0, 0, self.chunk(vocab_size) - len(head_CH)))

    def config(self, model: ModelConfig) -> ModelConfig:
        """Make the shape of this rank's layers; vocabulary and hidden size are the whole model's."""
        return replace(model, layers=tuple(map(self._layer, model.layers)))

    def _layer(self, layer: LayerConfig) -> LayerConfig:
        return LayerConfig(self._attention(layer.attention), self._mlp(layer.mlp))

    def _attention(self, attention: Attention) -> Attention:
        num_heads = self._share(attention.num_heads, "heads")
        if isinstance(attention, LatentAttention):
            return replace(attention, num_heads=num_heads)
        num_kv_heads = self._share(attention.num_kv_heads, "key-value heads")
        return replace(attention, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def _mlp(self, mlp: MLP) -> MLP:
        if isinstance(mlp, DenseMLP):
            return replace(mlp, size=self._share(mlp.size, "MLP channels"))
        shared = mlp.shared_size and self._share(mlp.shared_size, "channels of the shared expert")
        return replace(mlp, size=self._share(mlp.size, "channels of an expert"), shared_size=shared)

    def _share(self, size: int, name: str) -> int:
        require(size % self.size == 0, "tensor_parallel", self.size, f"a divisor of the {size} {name}")
        return size // self.size


def kv_layout_of(config: ModelConfig, part: RankPart | None) -> KVLayout:
    """Shape of the KV of a model, or of a rank's heads of it where `config` is that rank's.

    Latent vectors, which all heads read, are on every rank.
    """
    layout = config.kv_layout
    if part is None or layout.values_in_keys:
        return layout
    return replace(layout, first_head=part.rank * layout.num_kv_heads)
