"""Exercises of notebook 09: graphs and stale metadata."""

from collections.abc import Callable
from typing import Any

import torch

from specsim.course.exercise import Exercise, Mistake


def replayed(work: Callable[[], Any], buffers: dict[str, torch.Tensor], replays: int) -> dict[str, Any]:
    """Capture work on buffers, and observe them after this number of replays from their present content.

    RuntimeError with the same text for every read on the host.
    """
    from specsim.fast.runtime.graph import HostRead, Tape

    before = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        tape = Tape.of(work)
    except HostRead:
        raise RuntimeError("the capture is refused, as the host would read device data") from None
    for name, buffer in buffers.items():  # the capture has run the work once
        buffer.copy_(before[name])
    for _ in range(replays):
        tape.replay()
    return {name: buffer.tolist() for name, buffer in buffers.items()}


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
            "Indexing with a tensor makes a copy. The tokens were written into the copy, and the table has not "
            "changed. A slice would be a view, but its bounds are numbers of the host.",
        ),
        Mistake(
            _new_step,
            "`step = step + 1` makes a new tensor and gives it the old name. The graph's own step stays what it was, "
            "so every replay writes the same column. Use `step.add_(1)`.",
        ),
    ),
    "Both tensors are changed in place, at the addresses that the graph has, and the column is selected on the device.",
    after_steps,
)


def visible_keys(length: int, step: int, window: int) -> tuple[int, int]:
    """Find the first position that a draft step sees, and the number of positions, its own included.

    length: tokens of the prefix; step i is at position length + i.
    """
    # begin answer
    position = length + step
    first = max(0, position - window + 1)
    return first, position - first + 1
    # end answer


def _of_step_0(length: int, _step: int, window: int) -> tuple[int, int]:
    return visible_keys(length, 0, window)


def _stale_start(length: int, step: int, window: int) -> tuple[int, int]:
    first, _ = visible_keys(length, 0, window)
    return first, length + step - first + 1


def _one_too_many(length: int, step: int, window: int) -> tuple[int, int]:
    first = max(0, length + step - window)
    return first, length + step - first + 1


def _always_full(length: int, step: int, window: int) -> tuple[int, int]:
    return length + step - window + 1, window


VISIBLE_KEYS = Exercise(
    "09-2",
    "Write `visible_keys`. The prefix has the positions 0 to `length` − 1, and draft step i stands at position "
    "`length` + i. It sees itself and the positions before it, `window` positions in all, or fewer where the text has "
    "just begun. Return the first position and the number of positions, as a pair.\n\n"
    "Hint: compare with the upper panel of the picture.",
    visible_keys,
    ((20, 0, 16), (20, 4, 16), (5, 2, 16), (15, 1, 16), (7, 3, 1)),
    (
        Mistake(
            _of_step_0,
            "That is the window of step 0, whatever the step. Later steps do not see their own token.",
        ),
        Mistake(
            _stale_start,
            "The end advances, and the start stays that of step 0. Each step sees one key more than the step before. "
            "This is the fault of vllm#41162.",
        ),
        Mistake(
            _one_too_many,
            "The window includes the step's own position. So the first position is window − 1 before it, not window.",
        ),
        Mistake(
            _always_full,
            "A text that is shorter than the window has no positions below 0. A kernel would read memory before the "
            "first key.",
        ),
    ),
    "Both follow from the position of this step: a row at position r sees the key at position c if r − c < window.",
)


def advance(
    seq_lens: torch.Tensor, window_starts: torch.Tensor, step: torch.Tensor, window: int, last_step: int
) -> None:
    """Update the metadata in place for the next draft step; change nothing once step has reached last_step.

    seq_lens: keys of each request up to its own token. window_starts: first position that it sees.
    """
    # begin answer
    live = (step < last_step).long()
    seq_lens.add_(live)
    window_starts.copy_((seq_lens - window).clamp(min=0))
    step.add_(live)
    # end answer


def _starts_stay(
    seq_lens: torch.Tensor, _window_starts: torch.Tensor, step: torch.Tensor, _window: int, last_step: int
) -> None:
    live = (step < last_step).long()
    seq_lens.add_(live)
    step.add_(live)


def _host_decides(
    seq_lens: torch.Tensor, window_starts: torch.Tensor, step: torch.Tensor, window: int, last_step: int
) -> None:
    if step < last_step:
        _never_ends(seq_lens, window_starts, step, window, last_step)


def _never_ends(
    seq_lens: torch.Tensor, window_starts: torch.Tensor, step: torch.Tensor, window: int, _last_step: int
) -> None:
    seq_lens.add_(1)
    window_starts.copy_((seq_lens - window).clamp(min=0))
    step.add_(1)


def after_replays(
    answer: Callable[..., Any], seq_lens: list[int], window: int, last_step: int, replays: int
) -> dict[str, Any]:
    """Observe the metadata after replays of a graph of the answer."""
    lens = torch.tensor(seq_lens)
    buffers = {"seq_lens": lens, "window_starts": (lens - window).clamp(min=0), "step": torch.tensor([0])}
    return replayed(lambda: answer(*buffers.values(), window, last_step), buffers, replays)


ADVANCE = Exercise(
    "09-3",
    "Write `advance`, the update between two draft steps. It is captured together with the step and replayed with it. "
    "`seq_lens` and `window_starts` have one entry for each request, `step` has one element; `window` and `last_step` "
    "are numbers of the host, which never change. All lengths and the step grow by one. Each window starts `window` "
    "keys before the end of its request, or at 0.\n\n"
    "A replay follows the last step too. If `step` has reached `last_step`, nothing may change.\n\n"
    "Hint: a comparison of tensors gives a tensor. What is `(step < last_step).long()` before the last step, and after "
    "it?",
    advance,
    (([21, 24, 9], 16, 5, 3), ([21, 24, 9], 16, 5, 5), ([15, 16], 16, 2, 4), ([4], 8, 0, 1)),
    (
        Mistake(
            _starts_stay,
            "The starts of the windows have not changed: they are not updated, or a new tensor has got their name. "
            "Lengths advance, so each step sees one key more. This is the fault of vllm#41162.",
        ),
        Mistake(
            _host_decides,
            "`if` needs the value of a tensor on the host, and a capture refuses that. Compute with the comparison's "
            "result instead: add it where you would add 1.",
        ),
        Mistake(
            _never_ends,
            "The replay after the last step advances everything once more. The metadata is then that of a step that "
            "does not exist.",
        ),
    ),
    "The comparison stays on the device and is added in place of 1, so a replay after the last step adds 0. The starts "
    "are computed again from the new lengths, and written to the buffer that the graph reads.",
    after_replays,
)

EXERCISES = (WRITE_COLUMN, VISIBLE_KEYS, ADVANCE)
