"""The drafter protocol: everything a round asks of a drafter. The round knows no drafter by name."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, PrefillInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.target import ModelConfig


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of a drafter.

    model: the shape of its own layers. draft_vocab_size: size of its head. target_hidden_size: width of one target
    feature. feature_layers: the target layers whose *entering* hidden states it reads, ascending; () for the hidden
    that the target's head reads. norm_before_residual: whether the residual of an EAGLE-3 layer is taken after
    hidden_norm.
    """

    kind: str
    model: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False


class Drafter(Protocol):
    """A drafter of one column. kv_layout is None where it keeps no KV."""

    kv_layout: KVLayout | None
    feature_layers: tuple[int, ...]

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        """After the target's prefill of a chunk: what the first draft phase starts from."""
        ...

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        """The draft phase: candidates for the tree below each bonus token."""
        ...

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        """After verify: a fresh DraftInput from the accepted rows; draft KV of those rows is rewritten."""
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """What a DraftInput's hidden says of the first drafts: [R, draft vocabulary]."""
        ...

    def idle(self) -> DraftInput:
        """The DraftInput of no request."""
        ...


class Head(Protocol):
    """The decoder of a drafter that runs one forward a step; metadata is the column's own.

    d2t: offsets from draft to target ids, None where the vocabularies are equal.
    """

    kv_layout: KVLayout
    feature_layers: tuple[int, ...]
    hidden_size: int
    draft_vocab_size: int
    d2t: torch.Tensor | None

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """The target's features as the first hidden state, [R, H]."""
        ...

    def forward(self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: Any, kv: KVBuffer) -> torch.Tensor:
        """One forward over tokens and the hidden states one place before them: the hidden handed on, [R, H]."""
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """[R, draft vocabulary]."""
        ...
