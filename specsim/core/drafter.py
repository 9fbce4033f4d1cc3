"""The drafter protocol: everything that a round needs of a drafter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from specsim.core.block import BlockConfig
from specsim.core.config import SpecConfig
from specsim.core.errors import require, require_choice
from specsim.core.layer_config import HeadAttention
from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.target import ModelConfig

BLOCK_KINDS = ("dflash", "dspark")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of a drafter with weights."""

    kind: str
    model: ModelConfig  # of its own layers; mtp: of all modules, each of one layer
    draft_vocab_size: int  # of its head
    target_hidden_size: int  # width of one target feature
    feature_layers: tuple[int, ...] = ()  # target layers whose *entering* hidden it reads; (): what the head reads
    norm_before_residual: bool = False  # the residual of an EAGLE-3 layer is taken after hidden_norm
    norm_before_fc: bool = False  # an EAGLE-3.1 head norms the concatenated features, as one vector, before fc
    fc_norm: bool = False  # an EAGLE-3.1 head norms every feature by itself before they are concatenated for fc
    norm_output: bool = False  # an EAGLE-3.1 head hands on its hidden state after the final norm, not before it
    num_modules: int = 1  # of mtp; 1: one module makes all drafts
    hidden_chain: bool = True  # mtp module k reads the hidden state of module k-1; False: all read the target's
    # Rows of mtp modules that held refused drafts are written again with the true tokens, or stay as they are, which
    # costs acceptance only.
    boundary: Literal["rewrite", "stale"] = "rewrite"
    position: Literal["last", "next"] = "last"  # of every step of frozen-kv: L-1, or L
    # Token that a P-EAGLE head reads where no token is known yet; target features are replaced by `mask_hidden` there.
    mask_token_id: int = 0
    # A standalone model runs token p at position p, or token p+1 there, without the first token, as sgl-project/sglang.
    rows: Literal["own", "shifted"] = "own"
    block: BlockConfig | None = None  # of dflash and dspark

    def __post_init__(self) -> None:
        require(self.num_modules >= 1, "num_modules", self.num_modules, "at least 1")
        of_model = f"0 to {self.model.vocab_size - 1}, a token of the vocabulary"
        require(0 <= self.mask_token_id < self.model.vocab_size, "mask_token_id", self.mask_token_id, of_model)
        require_choice("position", self.position, ("last", "next"))
        require_choice("rows", self.rows, ("own", "shifted"))
        require_choice("boundary", self.boundary, ("rewrite", "stale"))
        is_block = self.kind in BLOCK_KINDS
        require(is_block == (self.block is not None), "block", self.block, "given for kinds dflash and dspark only")


def source_layers(config: DrafterConfig, target: ModelConfig) -> tuple[int, ...]:
    """List the target layer whose KV each layer of a frozen-KV drafter reads.

    It is the last one with the same kind of attention, sliding or full.
    """
    has_heads = all(isinstance(layer.attention, HeadAttention) for layer in target.layers)
    require(has_heads, "drafter", "frozen-kv", "a drafter with KV of its own: the target's KV is latent vectors")
    sources = []
    for layer in range(config.model.num_layers):
        is_sliding = config.model.window(layer) is not None
        same = [index for index in range(target.num_layers) if (target.window(index) is not None) == is_sliding]
        name = f"attention of the drafter's layer {layer}"
        require(bool(same), name, "sliding" if is_sliding else "full", "of a kind that its target has")
        sources.append(same[-1])
    return tuple(sources)


class Drafter(Protocol):
    """A drafter of one implementation, which the round does not know by name."""

    @property
    def kv_layout(self) -> KVLayout | None:
        """Shape of the drafter's KV, None where it keeps none."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose entering hidden states the drafter reads."""
        ...

    @property
    def lead(self) -> int:
        """Columns between a request's committed tokens and its draft lanes.

        0: draft slot p holds token p+1 (EAGLE). 1: slot p holds token p (a language model of its own).
        """
        ...

    @property
    def lookahead(self) -> int:
        """Tokens after the next one that a draft slot depends on.

        Draft slot p of a language model or an EAGLE head depends on tokens 0..p+1: lookahead 0. The last of S MTP
        modules depends on token p+S: lookahead S-1. That number of positions before the new rows is
        written again.
        """
        ...

    @property
    def block_rows(self) -> int:
        """Rows that the draft phase writes at once, from column L on.

        0: it has lanes, each with a row in a step, or writes nothing.
        """
        ...

    @property
    def num_mask_rows(self) -> int:
        """Columns after the committed ones that prefill and draft-extend write, and the next round overwrites.

        They hold the KV of mask tokens, by which a P-EAGLE head drafts several depths in one forward.
        """
        ...

    @property
    def runs_on_host(self) -> bool:
        """Check whether `propose` is host code, which no graph captures."""
        ...

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        """Make the input of the first draft phase after the target's prefill of a chunk."""
        ...

    def propose(self, batch: Batch, draft_input: Any, pools: KVPool) -> Candidates | ExplicitCandidates:
        """Run the draft phase, which proposes candidates for the tree below each bonus token.

        draft_input: of the drafter's own type.
        """
        ...

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        """Make the next DraftInput after verify, and rewrite the draft KV of the accepted rows."""
        ...

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Note that a request has ended with these tokens, its prompt_len prompt tokens first."""
        ...

    def idle(self) -> DraftInput:
        """Make the DraftInput of a batch without requests."""
        ...

    def under(self, config: SpecConfig) -> "Drafter":
        """Make a drafter of the same weights that proposes under a setting of no more lanes and steps.

        Its states are those of this drafter, so rounds of either may follow each other.
        """
        ...


def columns_ahead(drafter: Drafter) -> int:
    """Count the columns after the committed ones that a drafter needs between rounds."""
    return drafter.lead + drafter.num_mask_rows


class Head(Protocol):
    """The decoder of a drafter that runs one forward for each step.

    The metadata's type is the implementation's own.
    """

    kv_layout: KVLayout | None  # None: it reads the target's KV and writes none
    lead: int  # of the drafter
    feature_layers: tuple[int, ...]
    hidden_size: int
    draft_vocab_size: int
    d2t: torch.Tensor | None  # i64 [draft vocabulary], offsets from draft to target ids, None where they are the same

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
