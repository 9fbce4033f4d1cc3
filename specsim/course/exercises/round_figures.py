"""Exercise 08-3: one of the two counters for each reader."""

from collections.abc import Callable
from typing import Any

from specsim.course.exercise import Exercise, Mistake


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


def _tokens_in_rate(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    tokens = [drafts + 1 for drafts in num_accepted_drafts]
    return _figures(seq_lens, num_steps, tokens, list(num_accepted_drafts), tokens)


def _tokens_in_path(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    tokens = [drafts + 1 for drafts in num_accepted_drafts]
    return _figures(seq_lens, num_steps, tokens, tokens, num_accepted_drafts)


def _rates(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    rates = [drafts / num_steps for drafts in num_accepted_drafts]
    return {**round_figures(seq_lens, num_accepted_drafts, num_steps), "accept_rate": rates}


def _length_of_drafts(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    found = round_figures(seq_lens, num_accepted_drafts, num_steps)
    return {**found, "accept_length": found["accept_length"] - 1}


def _drafts_to_lengths(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    found = round_figures(seq_lens, num_accepted_drafts, num_steps)
    return {**found, "seq_lens": [length - 1 for length in found["seq_lens"]]}


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
    "the mean number of tokens of a request, and `accept_rate`. The rate is one number: of all requests' drafts, the "
    "share that is accepted, where each request counts `num_steps` drafts.\n\n"
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
        Mistake(
            _tokens_in_rate,
            "The rate counts the bonus token, which is no draft. With good drafts it is above 1.",
        ),
        Mistake(
            _tokens_in_path,
            "last_entry is one place too far. The root has place 0, so after n accepted drafts the path ends at place "
            "n. The bonus token has no node.",
        ),
        Mistake(
            _drafts_to_lengths,
            "The lengths grow by drafts only. The bonus token is committed as well, so it counts.",
        ),
        Mistake(
            _rates,
            "accept_rate is a list. The round has one rate: the sum of all accepted drafts, divided by num_steps times "
            "the number of requests.",
        ),
        Mistake(
            _length_of_drafts,
            "accept_length counts drafts only. It is the number of tokens of a round, with the bonus token.",
        ),
    ),
    "Lengths and accept length count tokens. The rate and the place in the path count drafts. Both counters are made "
    "once, and neither is changed.",
    with_old_counter,
)
