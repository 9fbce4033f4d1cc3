"""Exercises of notebook 08: typed states and two counters."""

from collections.abc import Callable
from typing import Any

from specsim.course.exercise import Exercise, Mistake
from specsim.course.exercises.next_hidden import NEXT_HIDDEN
from specsim.course.exercises.round_figures import ROUND_FIGURES

Rows = dict[str, list[Any]]


def between_rounds(
    state: dict[str, list[Any]], is_finished: list[bool], arriving: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    """Make the state of the next round: without the requests that have finished, then with those that arrive.

    state, arriving: by the name of a field, one entry for each request.
    """
    # begin answer
    keep = [request for request, done in enumerate(is_finished) if not done]
    return {name: [values[request] for request in keep] + arriving[name] for name, values in state.items()}
    # end answer


def _sliced(state: Rows, is_finished: list[bool], arriving: Rows) -> Rows:
    count = is_finished.count(False)
    return {name: values[:count] + arriving[name] for name, values in state.items()}


def _in_place(state: Rows, is_finished: list[bool], arriving: Rows) -> Rows:
    for name, values in state.items():
        values[:] = [value for value, done in zip(values, is_finished, strict=True) if not done] + arriving[name]
    return state


def _last_state_kept(state: Rows, is_finished: list[bool], arriving: Rows) -> Rows:
    return between_rounds(state, is_finished if not all(is_finished) else [False] * len(is_finished), arriving)


def _no_state(state: Rows, is_finished: list[bool], arriving: Rows) -> Rows | None:
    found = between_rounds(state, is_finished, arriving)
    return found if any(found.values()) else None


def _finished_kept(state: Rows, is_finished: list[bool], arriving: Rows) -> Rows:
    return between_rounds(state, [not done for done in is_finished], arriving)


def _arriving_first(state: Rows, is_finished: list[bool], arriving: Rows) -> Rows:
    kept = between_rounds(state, is_finished, NOBODY)
    return {name: arriving[name] + values for name, values in kept.items()}


def _last_state_returned(state: Rows, is_finished: list[bool], arriving: Rows) -> Rows:
    return state if all(is_finished) else between_rounds(state, is_finished, arriving)


def with_old_state(answer: Callable[..., Any], state: Rows, is_finished: list[bool], arriving: Rows) -> dict[str, Any]:
    """Observe the new state, and the old one afterwards."""
    found = answer(state, is_finished, arriving)
    return {"the new state": found, "afterwards the old state": state}


RUNNING = {"topk_index": [[5, 7], [9, 2], [4, 8]], "hidden": ["h0", "h1", "h2"]}
NEW = {"topk_index": [[1, 3]], "hidden": ["h9"]}
NOBODY: Rows = {"topk_index": [], "hidden": []}
BETWEEN_ROUNDS = Exercise(
    "08-2",
    "Write `between_rounds`, which a server calls after every round. `state` is the draft input of the running "
    "requests: a list for each field, with one entry for each request. Remove the requests that have finished, keep "
    "the others in their order, and append the requests that arrive. `arriving` has the same fields; if nobody "
    "arrives, its lists are empty.\n\n"
    "If all requests have finished, the result is still a state. And the old state must not change: under the overlap "
    "schedule another part still reads it.",
    between_rounds,
    (
        (RUNNING, [False, True, False], NEW),
        (RUNNING, [False, False, True], NOBODY),
        (RUNNING, [True, True, True], NEW),
        (RUNNING, [True, True, True], NOBODY),
        (NOBODY, [], NEW),
    ),
    (
        Mistake(
            _sliced,
            "That keeps the first entries, as many as there are requests left. If any but the last request finishes, "
            "another request's entries are kept. Select by index.",
        ),
        Mistake(
            _in_place,
            "The result is right, but the old state has changed too. Whoever still reads it now sees other requests. "
            "Return new lists.",
        ),
        Mistake(
            _last_state_kept,
            "When all requests have finished, their entries stay. The next arrivals are appended to them, and the "
            "state has more entries than the batch has requests.",
        ),
        Mistake(
            _no_state,
            "Without requests the result is None, so every reader would have to check for it. An empty list in every "
            "field is a state like any other: it can be merged with, and passes through every phase.",
        ),
        Mistake(
            _finished_kept,
            "The requests that have finished are kept, and the others are removed. Keep an entry where `is_finished` "
            "is false.",
        ),
        Mistake(
            _arriving_first,
            "The requests that arrive come first. Other tables of the server have the running requests first, so the "
            "rows would be read for the wrong requests.",
        ),
        Mistake(
            _last_state_returned,
            "When all requests have finished, the last state is returned: it has entries, and nobody owns them. Those "
            "that arrive are lost.",
        ),
    ),
    "Entries are selected by the index of their request, and nothing is changed in place. A batch without requests has "
    "an empty list in each field, to which the next arrivals can be appended.",
    with_old_state,
)


EXERCISES = (NEXT_HIDDEN, BETWEEN_ROUNDS, ROUND_FIGURES)
