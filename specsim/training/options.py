"""Settings of a training, and the conventions that trainer and engine share.

B windows · R rows · V vocabulary · H hidden
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import torch

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError, require, require_choice, require_int
from specsim.core.kinds import DEFAULT, KINDS, TRAINABLE
from specsim.core.limits import NumberRange, PositiveInteger, Probability, Width
from specsim.training.losses import LOSSES, POSITION_WEIGHTS
from specsim.training.target import feature_states

Index = TypeVar("Index", int, torch.Tensor)


@check_arguments
def label_column(row: Index, step: int) -> Index:
    """Find the column of the target whose distribution a row learns at an unrolled step.

    Row r of step i reads token r + i + 1. It drafts the token after it, r + i + 2, which the target predicts in column
    r + i + 1.
    """
    return row + step + 1


@check_arguments
def read_out(
    hidden_BRH: torch.Tensor, norm: Callable[[torch.Tensor], Any], lm_head: Callable[[torch.Tensor], Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logits of a step, and the hidden that the next step reads: the head's output *before* its norm."""
    return lm_head(norm(hidden_BRH)), hidden_BRH


@check_arguments
@dataclass(frozen=True, slots=True)
class Conventions:
    """Functions that trainer and engine must write alike; others than these train a head that no engine serves well."""

    label_column: Callable[..., Any] = label_column
    feature_states: Callable[..., Any] = feature_states
    read_out: Callable[..., Any] = read_out


ENGINE = Conventions()  # as specsim's engines, SGLang and vLLM serve heads


@check_arguments
@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Kind, sizes and objective of a training."""

    drafter: str = DEFAULT  # kind with weights
    num_steps: PositiveInteger = 160
    num_windows: PositiveInteger = 4  # of a step
    window: int = 64  # tokens
    num_drafts: PositiveInteger = 3  # depth that the drafter learns; also its number of modules, where it has some
    num_roots: PositiveInteger = 16  # tokens of a window after which blocks and mask rows draft
    loss: str = "cross-entropy"
    position_weights: str = "decay"
    peak_rate: Probability = 4e-3  # largest learning rate
    num_layers: PositiveInteger = 2  # of drafters of several layers
    intermediate_size: Width | None = None  # None: the target's
    # of a drafter with a smaller vocabulary: the most frequent tokens of the text
    draft_vocab_size: PositiveInteger = 1024
    feature_layers: tuple[int, ...] | None = None  # target layers whose entering states are read; None: three of them
    markov_rank: PositiveInteger = 32  # of a head with a Markov bias
    from_target: bool = True  # a head of a layer starts as the target's last one
    greedy_share: Probability = 0.5  # of windows that the target continued, those continued at temperature 0
    text_share: Probability = 0.0  # of windows, those of the text itself where there are continuations
    seed: Annotated[int, NumberRange(0, 2**31 - 1)] = 0
    conventions: Conventions = field(default=ENGINE, compare=False)

    def __post_init__(self) -> None:
        require_choice("drafter", self.drafter, TRAINABLE)
        require_choice("loss", self.loss, tuple(LOSSES))
        require_choice("position_weights", self.position_weights, tuple(POSITION_WEIGHTS))
        require_int("window", self.window, self.num_drafts + 2)
        if self.position_weights == "d-pace" and KINDS[self.drafter].drafts == "masks":
            allowed = "decay or equal: d-pace needs the same rows at every depth, which mask rows are not"
            raise InputError("position_weights", self.position_weights, allowed)

    def feature_layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Choose an early, a middle and a late layer of a target, where none are given; InputError for other layers."""
        last = num_layers - 1
        layers = self.feature_layers
        if layers is None:
            layers = tuple(sorted({min(1, last), (last + 1) // 2, last}))
        is_ascending = list(layers) == sorted({layer for layer in layers if 0 <= layer <= last})
        require(layers and is_ascending, "feature_layers", layers, f"ascending ids from 0 to {last}")
        return layers
