"""Exercise 08-1: from the rows of draft-extend to the rows of the next draft input."""

from itertools import accumulate

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


def _after_the_last(hidden: list[str], row_starts: list[int], num_accepted_tokens: list[int]) -> list[str]:
    return [hidden[start + count] for start, count in zip(row_starts[:-1], num_accepted_tokens, strict=True)]


def _without_the_start(hidden: list[str], _row_starts: list[int], num_accepted_tokens: list[int]) -> list[str]:
    return [hidden[count - 1] for count in num_accepted_tokens]


def _sums_of_counts(hidden: list[str], _row_starts: list[int], num_accepted_tokens: list[int]) -> list[str]:
    return [hidden[end - 1] for end in accumulate(num_accepted_tokens)]


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
        Mistake(
            _after_the_last,
            "That is one row too late: padding, or the next request's root. Rows count from 0, so the last of n rows "
            "is n − 1.",
        ),
        Mistake(
            _without_the_start,
            "That counts from the first row of all, so every request gets a row of request 0 or of its neighbours. The "
            "rows of request b begin at row_starts[b].",
        ),
        Mistake(
            _sums_of_counts,
            "A sum of counts is right only without padding. The rows of request b begin at row_starts[b], however many "
            "tokens the requests before it have accepted.",
        ),
    ),
    "The last accepted row of request b is row_starts[b] + num_accepted_tokens[b] - 1. The package has it as "
    "DraftExtendInput.last_rows. A new list is made, so nobody's earlier state changes.",
)
