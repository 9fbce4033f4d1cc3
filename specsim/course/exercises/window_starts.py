"""Exercise 09-3: an update of metadata that a graph can repeat."""

from collections.abc import Callable
from typing import Any

import torch

from specsim.course.exercise import Exercise, Mistake
from specsim.course.exercises.replay import replayed


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


def _starts_of_old_lengths(
    seq_lens: torch.Tensor, window_starts: torch.Tensor, step: torch.Tensor, window: int, last_step: int
) -> None:
    window_starts.copy_((seq_lens - window).clamp(min=0))
    _starts_stay(seq_lens, window_starts, step, window, last_step)


def _starts_below_0(
    seq_lens: torch.Tensor, window_starts: torch.Tensor, step: torch.Tensor, window: int, last_step: int
) -> None:
    _starts_stay(seq_lens, window_starts, step, window, last_step)
    window_starts.copy_(seq_lens - window)


def _starts_always_grow(
    seq_lens: torch.Tensor, window_starts: torch.Tensor, step: torch.Tensor, window: int, last_step: int
) -> None:
    window_starts.add_((step < last_step).long())
    _starts_stay(seq_lens, window_starts, step, window, last_step)


def _one_step_too_many(
    seq_lens: torch.Tensor, window_starts: torch.Tensor, step: torch.Tensor, window: int, last_step: int
) -> None:
    advance(seq_lens, window_starts, step, window, last_step + 1)


def _step_first(
    seq_lens: torch.Tensor, window_starts: torch.Tensor, step: torch.Tensor, window: int, last_step: int
) -> None:
    step.add_((step < last_step).long())
    seq_lens.add_((step < last_step).long())
    window_starts.copy_((seq_lens - window).clamp(min=0))


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
    "are numbers of the host, which never change. All lengths and the step grow by one. Then each window starts "
    "`window` keys before the new end of its request, or at 0 if the text is shorter than that.\n\n"
    "The graph is replayed after the last step too. If `step` has reached `last_step`, nothing may change.\n\n"
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
        Mistake(
            _starts_of_old_lengths,
            "The starts are computed before the lengths grow, so they are one step behind. Add to the lengths first.",
        ),
        Mistake(
            _starts_below_0,
            "A text that is shorter than the window has a start below 0, which is no position. `.clamp(min=0)` "
            "prevents it.",
        ),
        Mistake(
            _starts_always_grow,
            "Every start grows by one. But a text that is shorter than the window begins at 0, and its start has to "
            "stay there until the window is full. Compute the starts from the lengths.",
        ),
        Mistake(
            _one_step_too_many,
            "That is one step too many: nothing may change if `step` is equal to `last_step`.",
        ),
        Mistake(
            _step_first,
            "The step has changed before it is compared again, so in the last step the lengths do not grow. Compare "
            "once, and add the result everywhere.",
        ),
    ),
    "The comparison stays on the device and is added in place of 1, so a replay after the last step adds 0. The starts "
    "are computed again from the new lengths, and written to the buffer that the graph reads.",
    after_replays,
)
