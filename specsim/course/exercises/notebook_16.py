"""Exercises of notebook 16: train a head on a laptop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specsim.course.exercise import solves

_STATES = ("embedding", "output of layer 0", "output of layer 1", "output of layer 2", "output of layer 3")


def with_norm(answer: Callable[..., Any], hidden: list[float], norm_weight: list[float]) -> dict[str, Any]:
    """Observe both results with an RMS norm, and an lm_head that doubles."""
    weight = torch.tensor(norm_weight)
    logits, following = answer(torch.tensor(hidden), lambda x: weight * x / x.square().mean().sqrt(), lambda x: 2 * x)
    return {"logits": logits, "next hidden": following}


# The row drafts token r + i + 2, and the target predicts token c + 1 in column c. So c = r + i + 1: the column of the
# last token that the row has read.
# - `row + step`: In that column the target predicts the token that the row has just read. The head learns to repeat its
#   input: the loss becomes very small, and no draft is right.
# - `row + step + 2`: That is the number of the drafted token. The distribution over it is one column earlier, so this
#   label belongs to the token after it. The head would leave out a token.
# - `row + 1`: Only step 0 is right. A later step has read more tokens, so its label is in a later column.
# - `row`: That is the column of the row's features. At step 0 the row has already read one token more, and at every
#   later step another one.
# - `step + 1`: The row is missing. Every row reads the text from another token on.
@solves("16-1", (0, 0), (5, 0), (0, 2), (7, 3))
def label_column(row: int, step: int) -> int:
    """Find the column of the target that holds the label of a row at an unrolled step."""
    return row + step + 1


# The state that leaves layer i enters layer i + 1, so an output id is moved by one.
# - `layer + offset` → `layer`: The convention is not used. With output ids every feature is taken one layer too early.
#   Nothing fails, and the accept length is lower.
# - `+ offset` → `+ 1`: The convention is not used. With entering ids every feature is taken one layer too late.
# - `convention == "output"` → `convention == "entering"`: The conventions are swapped: the state that leaves layer i is
#   the one with index i + 1.
# - `layer + offset` → `layer - offset`: Output ids were moved to the wrong side. Layer i reads entry i and leaves entry
#   i + 1, not i − 1.
# - `in layers` → `in sorted(layers)`: The states are in another order than the ids. The head's first projection expects
#   the given order.
@solves("16-2", (_STATES, (1, 2, 3), "entering"), (_STATES, (0, 1, 2), "output"), (_STATES, (0,), "entering"),
        (_STATES, (3, 1), "output"))  # fmt: skip
def feature_states(hidden_states: Sequence[Any], layers: Sequence[int], convention: str) -> list[Any]:
    """Choose the hidden states that a head reads, in the order of its layer ids.

    hidden_states: entry i enters layer i. convention: "entering" or "output".
    """
    offset = 1 if convention == "output" else 0
    return [hidden_states[layer + offset] for layer in layers]


# The norm stands between the hidden state and lm_head alone. The next step applies a norm of its own to what it reads,
# and adds to the state without it.
# - `lm_head(norm(hidden)), norm(hidden)`: The logits are right, so the first draft is too. But the next step reads a
#   normed state, which has another length and other proportions: later drafts get worse.
# - `lm_head(hidden), hidden`: The hidden state is taken before the norm for the logits. lm_head was made for normed
#   states.
# - `lm_head(hidden), norm(hidden)`: The norm is on the wrong path: it belongs between the hidden state and lm_head, not
#   between two steps.
# - `norm(lm_head(hidden)), hidden`: The norm was applied to the logits. It comes before lm_head, which was made for
#   normed states.
# - `hidden, lm_head(norm(hidden))`: The values are right, but in the wrong order: first the logits, then the hidden
#   state.
# - `lm_head(norm(hidden)), lm_head(norm(hidden))`: The next step reads a hidden state, not logits. Logits have one
#   entry for each token of the vocabulary.
@solves("16-3", ([3.0, 4.0], [1.0, 1.0]), ([1.0, -2.0, 0.5], [2.0, 1.0, 0.5]), ([0.1, 0.1], [1.0, 3.0]),
        observe=with_norm)  # fmt: skip
def read_out(
    hidden: torch.Tensor, norm: Callable[..., Any], lm_head: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logits of a draft step, and the hidden state that the next step reads."""
    return lm_head(norm(hidden)), hidden
