"""Exercises of notebook 09: graphs and stale metadata."""

from specsim.course.exercise import Exercise, Mistake
from specsim.course.exercises.window_starts import ADVANCE
from specsim.course.exercises.write_column import WRITE_COLUMN


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


def _without_itself(length: int, step: int, window: int) -> tuple[int, int]:
    first = max(0, length + step - window)
    return first, length + step - first


def _full_from_0(length: int, step: int, window: int) -> tuple[int, int]:
    first, _ = visible_keys(length, step, window)
    return first, window


def _first_and_last(length: int, step: int, window: int) -> tuple[int, int]:
    first, _ = visible_keys(length, step, window)
    return first, length + step


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
        Mistake(
            _without_itself,
            "The step does not see itself here. Its own position is one of the `window` positions.",
        ),
        Mistake(
            _full_from_0,
            "The first position is right, but a short text has fewer than `window` positions up to the step's own.",
        ),
        Mistake(
            _first_and_last,
            "Those are the first and the last position. Return the first one and how many there are.",
        ),
    ),
    "Both follow from the position of this step: a row at position r sees the key at position c if r − c < window.",
)


EXERCISES = (WRITE_COLUMN, VISIBLE_KEYS, ADVANCE)
