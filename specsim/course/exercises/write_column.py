"""Exercise 09-1: a write that a graph can repeat for every step."""

from collections.abc import Callable
from typing import Any

import torch

from specsim.course.exercise import Exercise, Mistake
from specsim.course.exercises.replay import replayed


def write_column(draft_tokens: torch.Tensor, step: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write the tokens [B] to column `step` of draft_tokens [B, S], and add 1 to step, in place."""
    # begin answer
    draft_tokens.index_copy_(1, step, tokens[:, None])
    step.add_(1)
    # end answer


def _step_on_the_host(draft_tokens: torch.Tensor, step: torch.Tensor, tokens: torch.Tensor) -> None:
    draft_tokens[:, int(step)] = tokens
    step.add_(1)


def _into_a_copy(draft_tokens: torch.Tensor, step: torch.Tensor, tokens: torch.Tensor) -> None:
    draft_tokens[:, step].copy_(tokens[:, None])
    step.add_(1)


def _new_step(draft_tokens: torch.Tensor, step: torch.Tensor, tokens: torch.Tensor) -> None:
    draft_tokens.index_copy_(1, step, tokens[:, None])
    step = step + 1


def _no_second_axis(draft_tokens: torch.Tensor, step: torch.Tensor, tokens: torch.Tensor) -> None:
    draft_tokens.index_copy_(1, step, tokens)
    step.add_(1)


def _assigned_without_axis(draft_tokens: torch.Tensor, step: torch.Tensor, tokens: torch.Tensor) -> None:
    draft_tokens[:, step] = tokens
    step.add_(1)


def _step_first(draft_tokens: torch.Tensor, step: torch.Tensor, tokens: torch.Tensor) -> None:
    step.add_(1)
    draft_tokens.index_copy_(1, step, tokens[:, None])


def after_steps(answer: Callable[..., Any], batch: int, num_steps: int, replays: int) -> dict[str, Any]:
    """Observe the table after replays that draft 10, 11, … in request 0, 20, 21, … in request 1."""
    draft_tokens = torch.full((batch, num_steps), -1)
    step = torch.zeros(1, dtype=torch.int64)
    tokens = 10 * torch.arange(1, batch + 1)

    def work() -> None:
        answer(draft_tokens, step, tokens)
        tokens.add_(1)

    found = replayed(work, {"draft_tokens": draft_tokens, "step": step, "tokens": tokens}, replays)
    return {name: found[name] for name in ("draft_tokens", "step")}


WRITE_COLUMN = Exercise(
    "09-1",
    "Write `write_column`. It is captured once and replayed for every draft step, so it must work on the tensors in "
    "place. `draft_tokens[b, s]` is the draft of request b in step s, and `step` says which column comes next. "
    "Afterwards `step` must be one larger.\n\n"
    "Hint: the functions of torch that write in place end in `_`. `table.index_copy_(1, columns, values)` writes the "
    "values, [B, number of columns], to these columns. What does `table[:, columns]` give: a view or a copy?",
    write_column,
    ((2, 3, 3), (1, 4, 2), (3, 2, 1)),
    (
        Mistake(
            _step_on_the_host,
            "The step number is read on the host. A capture refuses that: at replay there is no host to read it, and "
            "every replay would write the column of the capture.",
        ),
        Mistake(
            _into_a_copy,
            "The table has not changed: the tokens were written into a copy. Indexing with a tensor makes one, and so "
            "does `index_copy` without `_`. A slice would be a view, but its bounds are numbers of the host.",
        ),
        Mistake(
            _new_step,
            "The graph's own step stays what it was, so every replay writes the same column. `step = step + 1` only "
            "makes a new tensor and gives it the old name. Use `step.add_(1)`.",
        ),
        Mistake(
            _no_second_axis,
            "The values need the two axes [B, 1]: a row for each request, and one column. `tokens[:, None]` has them.",
        ),
        Mistake(
            _assigned_without_axis,
            "The selected part of the table has the axes [B, 1], and the tokens have [B]. `tokens[:, None]` fits.",
        ),
        Mistake(
            _step_first,
            "The step grows before the tokens are written. So column 0 stays empty, and the last step writes outside "
            "the table.",
        ),
    ),
    "Both tensors are changed in place, at the addresses that the graph has, and the column is selected on the device.",
    after_steps,
)
