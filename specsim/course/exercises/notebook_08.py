"""Exercises of notebook 08: typed states and two counters."""

from collections.abc import Callable
from typing import Any

from specsim.course.exercise import solves

RUNNING = {"topk_index": [[5, 7], [9, 2], [4, 8]], "hidden": ["h0", "h1", "h2"]}
NEW = {"topk_index": [[1, 3]], "hidden": ["h9"]}
NOBODY: dict[str, list[Any]] = {"topk_index": [], "hidden": []}


def _rows(request: int, count: int, width: int) -> list[str]:
    """Name the rows of a request: its accepted tokens, then padding."""
    live = [f"request {request}, token {token}" for token in range(count)]
    return [*live, *[f"request {request}, padding"] * (width - count)]


def with_old_state(answer: Callable[..., Any], state: Any, is_finished: list[bool], arriving: Any) -> dict[str, Any]:
    """Observe the new state, and the old one afterwards."""
    return {"the new state": answer(state, is_finished, arriving), "afterwards the old state": state}


def with_old_counter(
    answer: Callable[..., Any], seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int
) -> dict[str, Any]:
    """Observe the figures, and the arguments afterwards."""
    figures = answer(seq_lens, num_accepted_drafts, num_steps)
    arguments = {"afterwards num_accepted_drafts": num_accepted_drafts, "afterwards the old seq_lens": seq_lens}
    return {**(figures if isinstance(figures, dict) else {}), **arguments}


# The last accepted row of request b is row_starts[b] + num_accepted_tokens[b] - 1. The package has it as
# DraftExtendInput.last_rows. A new list is made, so nobody's earlier state changes.
# - `start + count - 1` → `start`: These are the rows of the roots. The next drafts follow the last accepted token,
#   whose features are in the last accepted row.
# - `[hidden[end - 1] for end in row_starts[1:]]`: The last row of a request's block is right only without padding. With
#   a fixed number of rows it may be a row that no token belongs to.
# - `hidden[: len(num_accepted_tokens)]`: That reads the rows as if there were one for each request, which is what a
#   draft input has. Here the first rows are all of the first request. This is the error of one object with two
#   meanings.
# - `start + count - 1` → `start + max(1, count - 1) - 1`: That is one row too early. The rows count accepted tokens:
#   the root and the accepted drafts have one row each.
# - `start + count - 1` → `start + count`: That is one row too late: padding, or the next request's root. Rows count
#   from 0, so the last of n rows is n − 1.
# - `start + count - 1` → `count - 1`: That counts from the first row of all, so every request gets a row of request 0
#   or of its neighbours. The rows of request b begin at row_starts[b].
# - `[hidden[sum(num_accepted_tokens[: request + 1]) - 1] for request in range(len(num_accepted_tokens))]`: A sum of
#   counts is right only without padding. The rows of request b begin at row_starts[b], however many tokens the requests
#   before it have accepted.
@solves("08-1", ([*_rows(0, 4, 4), *_rows(1, 4, 4), *_rows(2, 2, 2)], [0, 4, 8, 10], [4, 4, 2]),
        ([*_rows(0, 2, 4), *_rows(1, 4, 4), *_rows(2, 1, 4)], [0, 4, 8, 12], [2, 4, 1]), (_rows(0, 1, 1), [0, 1], [1]),
        ([], [0], []))  # fmt: skip
def next_hidden(hidden: list[str], row_starts: list[int], num_accepted_tokens: list[int]) -> list[str]:
    """Select the row of draft-extend from which each request's next drafts are made.

    row_starts: first row of each request, then the number of rows.
    """
    return [hidden[start + count - 1] for start, count in zip(row_starts[:-1], num_accepted_tokens, strict=True)]


# Entries are selected by the index of their request, and nothing is changed in place. A batch without requests has an
# empty list in each field, to which the next arrivals can be appended.
# - `[values[request] for request in keep]` → `values[: len(keep)]`: That keeps the first entries, as many as there are
#   requests left. If any but the last request finishes, another request's entries are kept. Select by index.
# - `state.update(between_rounds(state, is_finished, arriving)) or state`: The result is right, but the old state has
#   changed too. Whoever still reads it now sees other requests. Return new lists.
# - `if not done` → `if not done or all(is_finished)`: When all requests have finished, their entries stay. The next
#   arrivals are appended to them, and the state has more entries than the batch has requests.
# - `rows if any((rows := between_rounds(state, is_finished, arriving)).values()) else None`: Without requests the
#   result is None, so every reader would have to check for it. An empty list in every field is a state like any other:
#   it can be merged with, and passes through every phase.
# - `if not done` → `if done`: The requests that have finished are kept, and the others are removed. Keep an entry where
#   `is_finished` is false.
# - `[values[request] for request in keep] + arriving[name]` → `arriving[name] + [values[request] for request in keep]`:
#   The requests that arrive come first. Other tables of the server have the running requests first, so the rows would
#   be read for the wrong requests.
# - `state if all(is_finished) else between_rounds(state, is_finished, arriving)`: When all requests have finished, the
#   last state is returned: it has entries, and nobody owns them. Those that arrive are lost.
@solves("08-2", (RUNNING, [False, True, False], NEW), (RUNNING, [False, False, True], NOBODY),
        (RUNNING, [True, True, True], NEW), (RUNNING, [True, True, True], NOBODY), (NOBODY, [], NEW),
        observe=with_old_state)  # fmt: skip
def between_rounds(
    state: dict[str, list[Any]], is_finished: list[bool], arriving: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    """Make the state of the next round: without the requests that have finished, then with those that arrive.

    state, arriving: by the name of a field, one entry for each request.
    """
    keep = [request for request, done in enumerate(is_finished) if not done]
    return {name: [values[request] for request in keep] + arriving[name] for name, values in state.items()}


# Lengths and accept length count tokens. The rate and the place in the path count drafts. Both counters are made once,
# and neither is changed.
# - `num_accepted_tokens = [` → `last_entry = [*num_accepted_drafts]; num_accepted_drafts[:] = num_accepted_tokens = [`,
#   `list(num_accepted_drafts)` → `last_entry`: One was added in place. The rate, which was computed after that, counts
#   bonus tokens as drafts, and the caller's counter has changed too. This is the line that sglang#23962 removed.
# - `list(num_accepted_drafts)` → `num_accepted_tokens`, `sum(num_accepted_drafts)` → `sum(num_accepted_tokens)`: All
#   entries count the bonus token. It is no draft, so the rate must not count it, and it has no node, so the last
#   accepted node is one place earlier.
# - `zip(seq_lens, num_accepted_tokens` → `zip(seq_lens, num_accepted_drafts`, `sum(num_accepted_tokens)` →
#   `sum(num_accepted_drafts)`: No entry but the first counts the bonus token. It is part of the output: lengths and
#   accept length grow by it.
# - `sum(num_accepted_drafts)` → `sum(num_accepted_tokens)`: The rate counts the bonus token, which is no draft. With
#   good drafts it is above 1.
# - `list(num_accepted_drafts)` → `num_accepted_tokens`: last_entry is one place too far. The root has place 0, so after
#   n accepted drafts the path ends at place n. The bonus token has no node.
# - `zip(seq_lens, num_accepted_tokens` → `zip(seq_lens, num_accepted_drafts`: The lengths grow by drafts only. The
#   bonus token is committed as well, so it counts.
# - `sum(num_accepted_drafts) / (num_steps * len(num_accepted_drafts))` →
#   `[drafts / num_steps for drafts in num_accepted_drafts]`: accept_rate is a list. The round has one rate: the sum of
#   all accepted drafts, divided by num_steps times the number of requests.
# - `sum(num_accepted_tokens)` → `sum(num_accepted_drafts)`: accept_length counts drafts only. It is the number of
#   tokens of a round, with the bonus token.
@solves("08-3", ([8, 9, 14], [3, 3, 1], 3), ([100, 7], [0, 2], 5), ([30], [0], 1), observe=with_old_counter)
def round_figures(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    """Compute what a round's readers need; the arguments must not change.

    Keys: num_accepted_tokens, seq_lens (after the round), last_entry, accept_length, accept_rate.
    """
    num_accepted_tokens = [drafts + 1 for drafts in num_accepted_drafts]
    return {
        "num_accepted_tokens": num_accepted_tokens,
        "seq_lens": [length + count for length, count in zip(seq_lens, num_accepted_tokens, strict=True)],
        "last_entry": list(num_accepted_drafts),
        "accept_length": sum(num_accepted_tokens) / len(num_accepted_tokens),
        "accept_rate": sum(num_accepted_drafts) / (num_steps * len(num_accepted_drafts)),
    }
