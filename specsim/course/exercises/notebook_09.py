"""Exercises of notebook 09: graphs and stale metadata."""

from collections.abc import Callable
from typing import Any

import torch

from specsim.course.exercise import solves


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


def after_steps(answer: Callable[..., Any], batch: int, num_steps: int, replays: int) -> dict[str, Any]:
    """Observe the table after replays that draft 10, 11, … in request 0, 20, 21, … in request 1."""
    table = {"draft_tokens": torch.full((batch, num_steps), -1), "step": torch.zeros(1, dtype=torch.int64)}
    tokens = 10 * torch.arange(1, batch + 1)

    def work() -> None:
        answer(*table.values(), tokens)
        tokens.add_(1)

    buffers = replayed(work, {**table, "tokens": tokens}, replays)
    return {name: buffers[name] for name in table}


def after_replays(
    answer: Callable[..., Any], seq_lens: list[int], window: int, last_step: int, replays: int
) -> dict[str, Any]:
    """Observe the metadata after replays of a graph of the answer."""
    lens = torch.tensor(seq_lens)
    buffers = {"seq_lens": lens, "window_starts": (lens - window).clamp(min=0), "step": torch.tensor([0])}
    return replayed(lambda: answer(*buffers.values(), window, last_step), buffers, replays)


# Both tensors are changed in place, at the addresses that the graph has, and the column is selected on the device.
# - `.index_copy_(1, step, tokens[:, None])` → `[:, int(step)] = tokens`: The step number is read on the host. A capture
#   refuses that: at replay there is no host to read it, and every replay would write the column of the capture.
# - `.index_copy_(1, step, tokens[:, None])` → `[:, step].copy_(tokens[:, None])`: The table has not changed: the tokens
#   were written into a copy. Indexing with a tensor makes one, and so does `index_copy` without `_`. A slice would be a
#   view, but its bounds are numbers of the host.
# - `step.add_(1)` → `step = step + 1`: The graph's own step stays what it was, so every replay writes the same column.
#   `step = step + 1` only makes a new tensor and gives it the old name. Use `step.add_(1)`.
# - `tokens[:, None]` → `tokens`: The values need the two axes [B, 1]: a row for each request, and one column.
#   `tokens[:, None]` has them.
# - `.index_copy_(1, step, tokens[:, None])` → `[:, step] = tokens`: The selected part of the table has the axes [B, 1],
#   and the tokens have [B]. `tokens[:, None]` fits.
# - `step.add_(1)` → `pass`, `draft_tokens.index_copy_` → `step.add_(1); draft_tokens.index_copy_`: The step grows
#   before the tokens are written. So column 0 stays empty, and the last step writes outside the table.
@solves("09-1", (2, 3, 3), (1, 4, 2), (3, 2, 1), observe=after_steps)
def write_column(draft_tokens: torch.Tensor, step: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write the tokens [B] to column `step` of draft_tokens [B, S], and add 1 to step, in place."""
    draft_tokens.index_copy_(1, step, tokens[:, None])
    step.add_(1)


# Both follow from the position of this step: a row at position r sees the key at position c if r − c < window.
# - `length + step` → `length`: That is the window of step 0, whatever the step. Later steps do not see their own token.
# - `position - window + 1` → `length - window + 1`: The end advances, and the start stays that of step 0. Each step
#   sees one key more than the step before. This is the fault of vllm#41162.
# - `position - window + 1` → `position - window`: The window includes the step's own position. So the first position is
#   window − 1 before it, not window.
# - `length + step - window + 1, window`: A text that is shorter than the window has no positions below 0. A kernel
#   would read memory before the first key.
# - `position - window + 1` → `position - window`, `position - first + 1` → `position - first`: The step does not see
#   itself here. Its own position is one of the `window` positions.
# - `position - first + 1` → `window`: The first position is right, but a short text has fewer than `window` positions
#   up to the step's own.
# - `position - first + 1` → `position`: Those are the first and the last position. Return the first one and how many
#   there are.
@solves("09-2", (20, 0, 16), (20, 4, 16), (5, 2, 16), (15, 1, 16), (7, 3, 1))
def visible_keys(length: int, step: int, window: int) -> tuple[int, int]:
    """Find the first position that a draft step sees, and the number of positions, its own included.

    length: tokens of the prefix; step i is at position length + i.
    """
    position = length + step
    first = max(0, position - window + 1)
    return first, position - first + 1


# The comparison stays on the device and is added in place of 1, so a replay after the last step adds 0. The starts are
# computed again from the new lengths, and written to the buffer that the graph reads.
# - `window_starts.copy_(` → `window_starts = (`: The starts of the windows have not changed: they are not updated, or a
#   new tensor has got their name. Lengths advance, so each step sees one key more. This is the fault of vllm#41162.
# - `(step < last_step).long()` → `1 if step < last_step else 0`: `if` needs the value of a tensor on the host, and a
#   capture refuses that. Compute with the comparison's result instead: add it where you would add 1.
# - `(step < last_step).long()` → `1`: The replay after the last step advances everything once more. The metadata is
#   then that of a step that does not exist.
# - `seq_lens - window` → `seq_lens - live - window`: The starts are computed before the lengths grow, so they are one
#   step behind. Add to the lengths first.
# - `(seq_lens - window).clamp(min=0)` → `seq_lens - window`: A text that is shorter than the window has a start below
#   0, which is no position. `.clamp(min=0)` prevents it.
# - `window_starts.copy_((seq_lens - window).clamp(min=0))` → `window_starts.add_(live)`: Every start grows by one. But
#   a text that is shorter than the window begins at 0, and its start has to stay there until the window is full.
#   Compute the starts from the lengths.
# - `<` → `<=`: That is one step too many: nothing may change if `step` is equal to `last_step`.
# - `seq_lens.add_(live)` → `seq_lens.add_((step + live < last_step).long())`: The step has changed before it is
#   compared again, so in the last step the lengths do not grow. Compare once, and add the result everywhere.
@solves("09-3", ([21, 24, 9], 16, 5, 3), ([21, 24, 9], 16, 5, 5), ([15, 16], 16, 2, 4), ([4], 8, 0, 1),
        observe=after_replays)  # fmt: skip
def advance(
    seq_lens: torch.Tensor, window_starts: torch.Tensor, step: torch.Tensor, window: int, last_step: int
) -> None:
    """Update the metadata in place for the next draft step; change nothing once step has reached last_step.

    seq_lens: keys of each request up to its own token. window_starts: first position that it sees.
    """
    live = (step < last_step).long()
    seq_lens.add_(live)
    window_starts.copy_((seq_lens - window).clamp(min=0))
    step.add_(live)
