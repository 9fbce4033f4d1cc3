"""Shapes of block drafters (DFlash, DSpark), and the rows of their draft phase, which reference and fast share."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from specsim.core.config import SpecConfig
from specsim.core.drafter import DrafterConfig
from specsim.core.errors import require, require_choice, require_int, require_number

CONFIDENCE = ("none", "hidden", "hidden_and_token")


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """One forward over [bonus, mask, mask, ...], whose rows see the context and one another."""

    size: int  # most rows of a block, the bonus token's included
    mask_token: int  # target id in every row but the first
    # A row drafts its own token, so that the first row drafts none (DFlash), or the token after it (DSpark). Tensors
    # are the same in both.
    predicts: Literal["own", "next"] = "own"
    markov_rank: int = 0  # width of the head that adds logits for the token before each draft; 0: none
    # A head that predicts whether each draft is accepted, from the row's hidden state, and from the token before the
    # draft as the Markov head embeds it.
    confidence: Literal["none", "hidden", "hidden_and_token"] = "none"
    threshold: float = 0.0  # drafts end before the first whose confidence is below it

    def __post_init__(self) -> None:
        require_int("block_size", self.size, 2)
        require_int("mask_token_id", self.mask_token, 0)
        require_choice("predicts", self.predicts, ("own", "next"))
        require_int("markov_rank", self.markov_rank, 0)
        require_choice("confidence", self.confidence, CONFIDENCE)
        require_number("confidence_threshold", self.threshold, 0, 1, "a number from 0 to 1")
        has_token = self.markov_rank > 0 or self.confidence != "hidden_and_token"
        require(has_token, "markov_rank", self.markov_rank, "at least 1 where the confidence head reads tokens")
        has_head = self.confidence != "none" or self.threshold == 0
        require(has_head, "confidence_threshold", self.threshold, "0 for a drafter without confidence head")

    @property
    def first_slot(self) -> int:
        """Row that makes the first draft."""
        return 1 if self.predicts == "own" else 0

    @property
    def most_drafts(self) -> int:
        """Depth of the deepest draft of a whole block."""
        return self.size - self.first_slot

    @property
    def cuts(self) -> bool:
        """Check whether the confidence head ends drafts."""
        return self.threshold > 0

    def rows(self, config: SpecConfig) -> int:
        """Count the rows of a draft phase, as many as the drafts need (as in vllm-project/vllm).

        Raises InputError for a setting with more steps than a block has drafts.
        """
        allowed = f"at most {self.most_drafts}, the drafts of a block of {self.size}"
        require(config.num_steps <= self.most_drafts, "num_steps", config.num_steps, allowed)
        return config.num_steps + self.first_slot


@dataclass(frozen=True, slots=True)
class BlockDrafterConfig(DrafterConfig):
    """Shape of a drafter that makes all drafts in one forward over a block."""

    block: BlockConfig = field(kw_only=True)
    # Layers in which a row sees the block's rows up to its own (JetSpec, arXiv 2606.18394); in others it sees all.
    causal_layers: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        allowed = f"ascending layers of 0 to {self.model.num_layers - 1}"
        layers = [layer for layer in range(self.model.num_layers) if layer in self.causal_layers]
        require(layers == list(self.causal_layers), "causal_layers", self.causal_layers, allowed)


@dataclass(frozen=True, slots=True)
class DFlashConfig(BlockDrafterConfig):
    """DFlash (arXiv 2602.06036): drafts of a block do not depend on each other."""

    kind: ClassVar[str] = "dflash"


@dataclass(frozen=True, slots=True)
class DSparkConfig(BlockDrafterConfig):
    """DSpark: a draft may depend on the token before it, and a low confidence may end the drafts."""

    kind: ClassVar[str] = "dspark"
