"""Exercises of notebook 08: typed states and two counters."""

from collections.abc import Callable
from typing import Any

from specsim.course.exercise import Exercise, Mistake


def next_hidden(hidden: list[str], row_starts: list[int], num_accepted_tokens: list[int]) -> list[str]:
    """Select the row of draft-extend from which each request's next drafts are made.

    row_starts: first row of each request, then the number of rows.
    """
    # begin answer
    return [hidden[start + count - 1] for start, count in zip(row_starts[:-1], num_accepted_tokens, strict=True)]
    # end answer


def _first_rows(hidden: list[str], row_starts: list[int], _num_accepted_tokens: list[int]) -> list[str]:
    return [hidden[start] for start in row_starts[:-1]]


def _last_rows_of_blocks(hidden: list[str], row_starts: list[int], _num_accepted_tokens: list[int]) -> list[str]:
    return [hidden[end - 1] for end in row_starts[1:]]


def _rows_of_requests(hidden: list[str], _row_starts: list[int], num_accepted_tokens: list[int]) -> list[str]:
    return hidden[: len(num_accepted_tokens)]


def _drafts_as_tokens(hidden: list[str], row_starts: list[int], num_accepted_tokens: list[int]) -> list[str]:
    counts = [max(1, count - 1) for count in num_accepted_tokens]
    return next_hidden(hidden, row_starts, counts)


def _rows(request: int, count: int, width: int) -> list[str]:
    """Name the rows of a request: its accepted tokens, then padding."""
    live = [f"request {request}, token {token}" for token in range(count)]
    return [*live, *[f"request {request}, padding"] * (width - count)]


NEXT_HIDDEN = Exercise(
    "08-1",
    "Write `next_hidden`. Draft-extend has computed a hidden state for every one of its rows, and the next draft phase "
    "needs one for each request: that of its last accepted token. Request b has the rows from `row_starts[b]` up to "
    "`row_starts[b + 1]`, which is not included. Its first `num_accepted_tokens[b]` rows are accepted tokens. With "
    '`extend="fixed"` there is padding behind them.\n\n'
    "The rows are texts here, so that you can see whose they are. Return a list with one of them for each request.",
    next_hidden,
    (
        ([*_rows(0, 4, 4), *_rows(1, 4, 4), *_rows(2, 2, 2)], [0, 4, 8, 10], [4, 4, 2]),
        ([*_rows(0, 2, 4), *_rows(1, 4, 4), *_rows(2, 1, 4)], [0, 4, 8, 12], [2, 4, 1]),
        (_rows(0, 1, 1), [0, 1], [1]),
        ([], [0], []),
    ),
    (
        Mistake(
            _first_rows,
            "These are the rows of the roots. The next drafts follow the last accepted token, whose features are in "
            "the last accepted row.",
        ),
        Mistake(
            _last_rows_of_blocks,
            "The last row of a request's block is right only without padding. With a fixed number of rows it may be a "
            "row that no token belongs to.",
        ),
        Mistake(
            _rows_of_requests,
            "That reads the rows as if there were one for each request, which is what a draft input has. Here the "
            "first rows are all of the first request. This is the error of one object with two meanings.",
        ),
        Mistake(
            _drafts_as_tokens,
            "That is one row too early. The rows count accepted tokens: the root and the accepted drafts have one "
            "row each.",
        ),
    ),
    "The last accepted row of request b is row_starts[b] + num_accepted_tokens[b] - 1. The package has it as "
    "DraftExtendInput.last_rows. A new list is made, so nobody's earlier state changes.",
)

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
    "the others in their order, and append the requests that arrive.\n\n"
    "Sometimes all requests have finished, and sometimes nobody arrives. The result is a state in these cases too. And "
    "the old state must not change: under the overlap schedule another part still reads it.",
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
    ),
    "Entries are selected by the index of their request, and nothing is changed in place. A batch without requests has "
    "an empty list in each field, to which the next arrivals can be appended.",
    with_old_state,
)


def round_figures(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    """Compute what a round's readers need; the arguments must not change.

    Keys: num_accepted_tokens, seq_lens (after the round), last_entry, accept_length, accept_rate.
    """
    # begin answer
    num_accepted_tokens = [drafts + 1 for drafts in num_accepted_drafts]
    return {
        "num_accepted_tokens": num_accepted_tokens,
        "seq_lens": [length + count for length, count in zip(seq_lens, num_accepted_tokens, strict=True)],
        "last_entry": list(num_accepted_drafts),
        "accept_length": sum(num_accepted_tokens) / len(num_accepted_tokens),
        "accept_rate": sum(num_accepted_drafts) / (num_steps * len(num_accepted_drafts)),
    }
    # end answer


def _figures(seq_lens: list[int], steps: int, adding: list[int], last: list[int], rate: list[int]) -> dict[str, Any]:
    """Compute the figures with a counter for each use."""
    return {
        "num_accepted_tokens": adding,
        "seq_lens": [length + count for length, count in zip(seq_lens, adding, strict=True)],
        "last_entry": last,
        "accept_length": sum(adding) / len(adding),
        "accept_rate": sum(rate) / (steps * len(rate)),
    }


def _added_in_place(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    last = list(num_accepted_drafts)
    for request in range(len(num_accepted_drafts)):
        num_accepted_drafts[request] += 1
    return _figures(seq_lens, num_steps, num_accepted_drafts, last, num_accepted_drafts)


def _tokens_everywhere(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    tokens = [drafts + 1 for drafts in num_accepted_drafts]
    return _figures(seq_lens, num_steps, tokens, tokens, tokens)


def _drafts_everywhere(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    drafts = list(num_accepted_drafts)
    tokens = [count + 1 for count in drafts]
    return {**_figures(seq_lens, num_steps, drafts, drafts, drafts), "num_accepted_tokens": tokens}


def with_old_counter(
    answer: Callable[..., Any], seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int
) -> dict[str, Any]:
    """Observe the figures, and the arguments afterwards."""
    found = answer(seq_lens, num_accepted_drafts, num_steps)
    arguments = {"afterwards num_accepted_drafts": num_accepted_drafts, "afterwards the old seq_lens": seq_lens}
    return {**(found if isinstance(found, dict) else {}), **arguments}


ROUND_FIGURES = Exercise(
    "08-3",
    "Write `round_figures`. A round of some requests with a chain or a tree of `num_steps` steps has accepted "
    "`num_accepted_drafts` drafts, a number for each request. Return a dictionary with five entries. For each request: "
    "`num_accepted_tokens`, `seq_lens` after the round (the old ones are given), and `last_entry`, the place of the "
    "last accepted node in its row of accept_index, where the root has place 0. For the whole round: `accept_length`, "
    "the mean number of tokens, and `accept_rate`, the accepted drafts divided by `num_steps` for each request.\n\n"
    "Choose one of the two counters for each entry. The arguments must not change.",
    round_figures,
    (([8, 9, 14], [3, 3, 1], 3), ([100, 7], [0, 2], 5), ([30], [0], 1)),
    (
        Mistake(
            _added_in_place,
            "One was added in place. The rate, which was computed after that, counts bonus tokens as drafts, and the "
            "caller's counter has changed too. This is the line that sglang#23962 removed.",
        ),
        Mistake(
            _tokens_everywhere,
            "All entries count the bonus token. It is no draft, so the rate must not count it, and it has no node, so "
            "the last accepted node is one place earlier.",
        ),
        Mistake(
            _drafts_everywhere,
            "No entry but the first counts the bonus token. It is part of the output: lengths and accept length grow "
            "by it.",
        ),
    ),
    "Lengths and accept length count tokens. The rate and the place in the path count drafts. Both counters are made "
    "once, and neither is changed.",
    with_old_counter,
)

EXERCISES = (NEXT_HIDDEN, BETWEEN_ROUNDS, ROUND_FIGURES)
