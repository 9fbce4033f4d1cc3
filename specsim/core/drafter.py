"""The drafter protocol: everything that a round needs of a drafter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch

from specsim.core.config import SpecConfig
from specsim.core.errors import require
from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.rank_group import RankGroup
from specsim.core.target import ModelConfig


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of a drafter with weights. Every kind has a class of its own, with the fields that only it has."""

    kind: ClassVar[str]  # name of its record in specsim.core.kinds
    model: ModelConfig  # of its own layers
    draft_vocab_size: int  # of its head
    target_hidden_size: int  # width of one target feature
    # Target layers whose *entering* hidden it reads, their number for that after the last one; (): what the head reads.
    feature_layers: tuple[int, ...] = ()

    @property
    def reads(self) -> str:
        """Describe the drafter's inputs."""
        return self.hidden_states

    @property
    def hidden_states(self) -> str:
        """Describe the target's hidden states that the drafter reads."""
        layers = ", ".join(map(str, self.feature_layers))
        return f"the input of layers {layers}" if layers else "the input of the head"


class Placement(NamedTuple):
    """Numbers, device and ranks with which an engine runs its drafter; the reference reads dtype only."""

    dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    batch_invariant: bool = False
    ranks: RankGroup | None = None  # that share the drafter's weights; None: this rank has all of them


class Drafter(Protocol):
    """A drafter of one implementation, which the round does not know by name.

    What it defines here holds for a drafter that keeps no KV, and of a request nothing but the root.
    """

    kv_layout: KVLayout | None = None  # shape of its KV, None where it keeps none
    feature_layers: tuple[int, ...] = ()  # target layers whose entering hidden states it reads
    # Columns of its KV for the bonus token, before its lanes. 0: draft slot p holds token p+1 (EAGLE). 1: slot p holds
    # token p (a language model of its own).
    bonus_columns: int = 0
    # Tokens after the next one that a draft slot depends on. Draft slot p of a language model or an EAGLE head depends
    # on tokens 0..p+1: lookahead 0. The last of S modules depends on token p+S: lookahead S-1. That number of positions
    # before the new rows is written again.
    lookahead: int = 0
    # Rows that the draft phase writes at once, from column L on. 0: it has lanes, each with a row in a step, or writes
    # nothing.
    block_rows: int = 0
    # Columns after the committed ones that prefill and draft-extend write, and the next round overwrites. They hold the
    # KV of mask tokens, by which a head drafts several depths in one forward.
    num_mask_rows: int = 0
    runs_on_host: bool = False  # whether `propose` is host code, which no graph captures

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        """Make the input of the first draft phase after the target's prefill of a chunk."""
        return DraftInput(next_tokens.int())

    def propose(self, batch: Batch, draft_input: Any, pools: KVPool) -> Candidates | ExplicitCandidates:
        """Run the draft phase, which proposes candidates for the tree below each bonus token.

        draft_input: of the drafter's own type.
        """
        ...

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        """Make the next DraftInput after verify, and rewrite the draft KV of the accepted rows."""
        return DraftInput(draft_extend_input.bonus_tokens)

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Note that a request has ended with these tokens, its prompt_len prompt tokens first."""

    def idle(self) -> DraftInput:
        """Make the DraftInput of a batch without requests."""
        return DraftInput(torch.empty(0, dtype=torch.int32))

    def with_config(self, config: SpecConfig) -> Self:
        """Make the drafter of the same weights that proposes under a setting of no more lanes and steps.

        An engine of that setting proposes with it, from what `narrowed` leaves of a state, and seeds and extends with
        this one. So states are the same after rounds of either.
        """
        ...


def check_topk(config: SpecConfig, draft_vocab_size: int) -> None:
    """Raise InputError for more drafts of a node than the draft vocabulary has."""
    require(config.topk <= draft_vocab_size, "topk", config.topk, f"at most the draft vocabulary, {draft_vocab_size}")


def columns_ahead(drafter: Drafter) -> int:
    """Count the columns after the committed ones that a drafter needs between rounds."""
    return drafter.bonus_columns + drafter.num_mask_rows


class Head(Protocol):
    """The decoder of a drafter that runs one forward for each step.

    The metadata's type is the implementation's own.
    """

    bonus_columns: int  # of the drafter
    feature_layers: tuple[int, ...]
    hidden_size: int
    draft_vocab_size: int

    @property
    def kv_layout(self) -> KVLayout | None:
        """Shape of its KV, None where it reads the target's KV and writes none."""
        ...

    @property
    def d2t(self) -> torch.Tensor | None:
        """Offsets from draft to target ids, i64 [draft vocabulary], None where they are the same."""
        ...

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Compute the first hidden states, [R, H], from the target's features."""
        ...

    def forward(self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: Any, kv: KVBuffer) -> torch.Tensor:
        """Run tokens, each with the hidden state of the position before it if the head reads one.

        Returns the next hidden states, [R, H].
        """
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute draft logits, [R, draft vocabulary]."""
        ...
