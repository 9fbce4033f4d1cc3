"""Exercises of notebook 12: other drafters."""

from collections.abc import Callable, Iterable
from fractions import Fraction

from specsim.course.exercise import Exercise, Mistake


def prompt_lookup(tokens: list[int], max_ngram: int, num_drafts: int) -> list[int]:
    """Propose at most num_drafts tokens: those after the earliest match of the longest n-gram that occurs earlier."""
    # begin answer
    for n in range(max_ngram, 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + num_drafts]
    return []
    # end answer


def _looked_up(
    tokens: list[int], sizes: Iterable[int], num_drafts: int | None, backwards: bool, more: int
) -> list[int]:
    for n in sizes:
        starts = range(max(0, len(tokens) - n + more))
        for start in reversed(starts) if backwards else starts:
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n :][:num_drafts]
    return []


def _latest(tokens: list[int], max_ngram: int, num_drafts: int) -> list[int]:
    return _looked_up(tokens, range(max_ngram, 0, -1), num_drafts, backwards=True, more=0)


def _shortest_first(tokens: list[int], max_ngram: int, num_drafts: int) -> list[int]:
    return _looked_up(tokens, range(1, max_ngram + 1), num_drafts, backwards=False, more=0)


def _finds_itself(tokens: list[int], max_ngram: int, num_drafts: int) -> list[int]:
    return _looked_up(tokens, range(max_ngram, 0, -1), num_drafts, backwards=False, more=1)


def _no_limit(tokens: list[int], max_ngram: int, _num_drafts: int) -> list[int]:
    return _looked_up(tokens, range(max_ngram, 0, -1), None, backwards=False, more=0)


def _not_down_to_one(tokens: list[int], max_ngram: int, num_drafts: int) -> list[int]:
    return _looked_up(tokens, range(max_ngram, 1, -1), num_drafts, backwards=False, more=0)


def _no_overlap(tokens: list[int], max_ngram: int, num_drafts: int) -> list[int]:
    for n in range(max_ngram, 0, -1):
        for start in range(len(tokens) - 2 * n + 1):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n :][:num_drafts]
    return []


def _match_itself(tokens: list[int], max_ngram: int, num_drafts: int) -> list[int]:
    for n in range(max_ngram, 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start:][:num_drafts]
    return []


PROMPT_LOOKUP = Exercise(
    "12-1",
    "Write `prompt_lookup`. Take the last n tokens of the list, first for n = `max_ngram`, then for shorter ones down "
    "to n = 1. Search for the same n tokens further left. At the first n that has a match, return the tokens after it, "
    "at most `num_drafts`. If it has several matches, take the *earliest*. Without any match return an empty list.\n\n"
    "At least one token must follow a match. A match may overlap the last n tokens, and what follows may reach into "
    "them.\n\n"
    "Example: in 1 2 3 9 1 2 3 the last three tokens also stand at the beginning, and 9 1 follows.",
    prompt_lookup,
    (
        ([1, 2, 3, 9, 1, 2, 3], 3, 2),
        ([5, 1, 6, 1, 7, 1], 2, 2),
        ([2, 4, 1, 2, 8, 1, 2], 2, 2),
        ([7, 7, 7], 2, 3),
        ([1, 2, 3], 3, 4),
        ([9, 1, 2, 3, 1, 2], 3, 2),
        ([4], 2, 2),
    ),
    (
        Mistake(
            _latest,
            "That is the latest match. Prompt lookup as in vLLM takes the earliest: the text after it is the longest.",
        ),
        Mistake(
            _shortest_first,
            "Short n-grams were tried first. A long match says much more about what follows, so begin with max_ngram.",
        ),
        Mistake(
            _finds_itself,
            "Nothing is proposed, although a shorter n-gram has a match. Either the last n tokens were found as a "
            "match of themselves, where no token follows, or only n = max_ngram is tried.",
        ),
        Mistake(
            _not_down_to_one,
            "n = 1 is never tried: range(max_ngram, 1, -1) ends at 2.",
        ),
        Mistake(
            _no_overlap,
            "A match must begin earlier, but it may overlap the last n tokens: in 7 7 7, the first two tokens equal "
            "the last two, and a 7 follows.",
        ),
        Mistake(
            _match_itself,
            "The match itself is proposed. Its tokens are already at the end of the text: begin after them.",
        ),
        Mistake(_no_limit, "All tokens after the match are proposed. A round verifies at most num_drafts of them."),
    ),
    "The longest n-gram that occurs earlier decides. No weights are read, so such drafts cost almost nothing.",
)


def bridged(draft_prob: list[Fraction], draft_tokens: list[str], target_tokens: list[str]) -> list[Fraction]:
    """Compute the probability of every token of the target, by its id there, for a drafter with another vocabulary."""
    # begin answer
    by_text = dict(zip(draft_tokens, draft_prob, strict=True))
    weights = [by_text.get(text, Fraction(0)) for text in target_tokens]
    return [weight / sum(weights) for weight in weights]
    # end answer


def _by_id(draft_prob: list[Fraction], _draft_tokens: list[str], target_tokens: list[str]) -> list[Fraction]:
    weights = [*draft_prob, *[Fraction(0)] * len(target_tokens)][: len(target_tokens)]
    return [weight / sum(weights) for weight in weights]


def _not_normalised(draft_prob: list[Fraction], draft_tokens: list[str], target_tokens: list[str]) -> list[Fraction]:
    by_text = dict(zip(draft_tokens, draft_prob, strict=True))
    return [by_text.get(text, Fraction(0)) for text in target_tokens]


def _spread(draft_prob: list[Fraction], draft_tokens: list[str], target_tokens: list[str]) -> list[Fraction]:
    weights = _not_normalised(draft_prob, draft_tokens, target_tokens)
    share = (1 - sum(weights, Fraction(0))) / len(weights)
    return [weight + share for weight in weights]


def _only_common(draft_prob: list[Fraction], draft_tokens: list[str], target_tokens: list[str]) -> list[Fraction]:
    return [prob for prob in bridged(draft_prob, draft_tokens, target_tokens) if prob]


def _equal_shares(draft_prob: list[Fraction], draft_tokens: list[str], target_tokens: list[str]) -> list[Fraction]:
    weights = _not_normalised(draft_prob, draft_tokens, target_tokens)
    share = (1 - sum(weights, Fraction(0))) / sum(weight > 0 for weight in weights)
    return [weight + share if weight else weight for weight in weights]


def _by_id_not_normalised(
    draft_prob: list[Fraction], _draft_tokens: list[str], target_tokens: list[str]
) -> list[Fraction]:
    return [*draft_prob, *[Fraction(0)] * len(target_tokens)][: len(target_tokens)]


EIGHTHS = tuple(Fraction(number, 8) for number in range(9))
BRIDGED = Exercise(
    "12-2",
    "Write `bridged`. A draft model has the tokens `draft_tokens`, and its probabilities are `draft_prob`, in the same "
    "order. The target has the tokens `target_tokens`. A token is the same if its text is. Return the probabilities "
    "from which drafts are drawn: a list with one fraction for each of the target's tokens, which sum to 1. A token "
    "that only one of the models has is never drafted. The relation between two common tokens stays as it is.",
    bridged,
    (
        ([EIGHTHS[4], EIGHTHS[3], EIGHTHS[1]], ["owl", "cat", "dog"], ["dog", "owl", "cat"]),
        ([EIGHTHS[4], EIGHTHS[2], EIGHTHS[2]], ["owl", "cat", "dog"], ["cat", "emu", "owl"]),
        ([EIGHTHS[6], EIGHTHS[2]], ["owl", "cat"], ["fox", "cat", "emu", "owl"]),
        ([EIGHTHS[1], EIGHTHS[6], EIGHTHS[1]], ["owl", "cat", "dog"], ["owl", "dog"]),
    ),
    (
        Mistake(
            _by_id,
            "Equal ids do not mean equal tokens, and equal sizes do not prove it. Engines had exactly this fault: "
            "tokens have to be matched by their texts.",
        ),
        Mistake(
            _not_normalised,
            "The probabilities do not sum to 1 where the drafter has tokens that the target lacks. Drafts are drawn "
            "from the common tokens only, and verification needs the distribution from which they were drawn.",
        ),
        Mistake(
            _spread,
            "The rest of the probability was given to all tokens, also to those that the drafter does not know. "
            "Divide by the sum instead.",
        ),
        Mistake(
            _equal_shares,
            "The rest of the probability was shared out equally. Then the relation between two common tokens changes: "
            "divide by the sum instead.",
        ),
        Mistake(
            _only_common,
            "The list has only the common tokens. It needs one entry for every token of the target, and 0 for those "
            "that the drafter does not know.",
        ),
        Mistake(
            _by_id_not_normalised,
            "The probabilities were taken over by their place in the list. Match the tokens by their texts, then "
            "divide by the sum.",
        ),
    ),
    "Mask, divide by the sum, number by the target's ids. Verification gets exactly this q, so it stays lossless.",
)


def best_drafter(drafters: dict[str, tuple[float, float]], num_drafts: int) -> str:
    """Name the drafter with the largest speed-up; `none` where no drafter is faster than plain decoding.

    drafters: accept length and cost of one draft, as a share of a forward pass of the target, by name.
    """
    # begin answer
    speedups = {"none": 1.0}
    for name, (accept_length, cost) in drafters.items():
        speedups[name] = accept_length / (1 + num_drafts * cost)
    return max(speedups, key=lambda name: speedups[name])
    # end answer


def _longest(drafters: dict[str, tuple[float, float]], _num_drafts: int) -> str:
    return max(drafters, key=lambda name: drafters[name][0], default="none")


def _paid_once(drafters: dict[str, tuple[float, float]], _num_drafts: int) -> str:
    return best_drafter(drafters, 1)


def _always_one(drafters: dict[str, tuple[float, float]], num_drafts: int) -> str:
    return max(drafters, key=lambda name: drafters[name][0] / (1 + num_drafts * drafters[name][1]), default="none")


def _best(drafters: dict[str, tuple[float, float]], gain: Callable[[float, float], float]) -> str:
    """Name the drafter with the largest gain, a function of accept length and cost, or none."""
    gains = {"none": 1.0} | {name: gain(length, cost) for name, (length, cost) in drafters.items()}
    return max(gains, key=lambda name: gains[name])


def _cost_subtracted(drafters: dict[str, tuple[float, float]], num_drafts: int) -> str:
    return _best(drafters, lambda length, cost: length - num_drafts * cost)


def _one_draft_more(drafters: dict[str, tuple[float, float]], num_drafts: int) -> str:
    return best_drafter(drafters, num_drafts + 1)


def _accepted_only(drafters: dict[str, tuple[float, float]], _num_drafts: int) -> str:
    return _best(drafters, lambda length, cost: length / (1 + (length - 1) * cost))


def _target_twice(drafters: dict[str, tuple[float, float]], num_drafts: int) -> str:
    return _best(drafters, lambda length, cost: (length + 1) / (1 + num_drafts * cost))


BEST_DRAFTER = Exercise(
    "12-3",
    "Write `best_drafter`. It receives the accept length and the cost of one draft for each drafter by name, and the "
    "number of drafts in a round. The cost is a share of a forward pass of the target. A round costs one such pass, "
    "and the drafts, one after the other. Plain decoding gives one token per pass. Return the name of the drafter with "
    'the largest speed-up, or `"none"` if no drafter is faster than plain decoding.',
    best_drafter,
    (
        ({"large": (3.5, 0.3), "small": (2.2, 0.02)}, 5),
        ({"eagle": (2.6, 0.05), "standalone": (3.2, 0.5), "ngram": (2.0, 0.0)}, 3),
        ({"slow": (1.3, 0.2)}, 3),
        ({"slow": (1.9, 0.4), "slower": (2.5, 0.6)}, 3),
        ({"ngram": (1.2, 0.0), "eagle": (2.9, 0.5)}, 4),
        ({"eagle": (1.75, 0.2)}, 3),
        ({"large": (4.0, 0.3), "small": (2.5, 0.03)}, 3),
    ),
    (
        Mistake(
            _longest,
            "The largest accept length is not the largest speed-up. A drafter that is right more often may take more "
            "time than it saves.",
        ),
        Mistake(
            _paid_once,
            "The cost is that of one draft. Drafts are made one after the other, so a round pays it num_drafts times.",
        ),
        Mistake(
            _always_one,
            "Where every speed-up is below 1, plain decoding is the best choice.",
        ),
        Mistake(
            _cost_subtracted,
            "Tokens and time were subtracted from each other. A speed-up is tokens per time: divide the accept length "
            "by the time of a round.",
        ),
        Mistake(
            _accepted_only,
            "Only the accepted drafts were paid for. Every draft of a round is made, and a rejected one costs as much.",
        ),
        Mistake(
            _target_twice,
            "The accept length counts the target's own token already. Add nothing to it.",
        ),
        Mistake(
            _one_draft_more,
            "One draft too many was paid for. A round makes num_drafts drafts.",
        ),
    ),
    "Speed-up = accept length / (1 + drafts · cost). It is the formula of notebook 02, with a measured accept length.",
)

EXERCISES = (PROMPT_LOOKUP, BRIDGED, BEST_DRAFTER)
