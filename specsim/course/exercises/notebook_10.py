"""Exercises of notebook 10: find the fault."""

from collections.abc import Callable
from math import inf, isclose, isnan, nan
from typing import Any

from specsim.course.exercise import Exercise, Mistake
from specsim.course.hidden_faults import NUMBERED, SUSPECTS

Steps = list[tuple[int, str, dict[str, list[float]]]]
Place = tuple[int, str, str, int] | None


def first_difference(
    reference: list[tuple[int, str, dict[str, list[float]]]],
    fast: list[tuple[int, str, dict[str, list[float]]]],
    tolerance: float,
) -> tuple[int, str, str, int] | None:
    """Find the first wrong value: its round, phase, field and index in the field; None if all values are right."""
    # begin answer
    for (number, phase, expected), (_, _, found) in zip(reference, fast, strict=True):
        for field, values in expected.items():
            for index, (right, value) in enumerate(zip(values, found[field], strict=True)):
                if not abs(right - value) <= tolerance:
                    return number, phase, field, index
    return None
    # end answer


def _search(reference: Steps, fast: Steps, is_wrong: Callable[[float, float], bool], order: Any = list) -> Place:
    for (number, phase, expected), (_, _, found) in zip(reference, fast, strict=True):
        for field in order(expected):
            for index, (right, value) in enumerate(zip(expected[field], found[field], strict=True)):
                if is_wrong(right, value):
                    return number, phase, field, index
    return None


def _bit_for_bit(reference: Steps, fast: Steps, _tolerance: float) -> Place:
    return _search(reference, fast, lambda right, value: right != value)


def _misses_nan(reference: Steps, fast: Steps, tolerance: float) -> Place:
    return _search(reference, fast, lambda right, value: abs(right - value) > tolerance)


def _by_name(reference: Steps, fast: Steps, tolerance: float) -> Place:
    return _search(reference, fast, lambda right, value: not abs(right - value) <= tolerance, sorted)


def _signed(reference: Steps, fast: Steps, tolerance: float) -> Place:
    return _search(reference, fast, lambda right, value: not value - right <= tolerance)


def _relative(reference: Steps, fast: Steps, tolerance: float) -> Place:
    return _search(reference, fast, lambda right, value: not isclose(right, value, rel_tol=tolerance))


def _below(reference: Steps, fast: Steps, tolerance: float) -> Place:
    return _search(reference, fast, lambda right, value: not abs(right - value) < tolerance)


def _largest_of_field(reference: Steps, fast: Steps, tolerance: float) -> Place:
    for (number, phase, expected), (_, _, found) in zip(reference, fast, strict=True):
        for field, values in expected.items():
            pairs = zip(values, found[field], strict=True)
            errors = [inf if isnan(value) else abs(right - value) for right, value in pairs]
            if max(errors) > tolerance:
                return number, phase, field, errors.index(max(errors))
    return None


def _largest(reference: Steps, fast: Steps, tolerance: float) -> Place:
    best: Place = None
    most = tolerance
    for (number, phase, expected), (_, _, found) in zip(reference, fast, strict=True):
        for field, values in expected.items():
            for index, (right, value) in enumerate(zip(values, found[field], strict=True)):
                error = inf if isnan(value) else abs(right - value)
                if error > most:
                    best = (number, phase, field, index)
                    most = error
    return best


def _run(scores: float, keys: float, logprobs: float, bonus: int) -> Steps:
    """Two phases of a round, and the next draft; keys are computed before logprobs."""
    return [
        (1, "draft", {"tokens": [4, 7, 9], "scores": [0.5, 0.25, scores]}),
        (1, "verify", {"keys": [0.125, keys], "logprobs": [-0.5, -1.0, logprobs], "bonus_tokens": [bonus]}),
        (2, "draft", {"tokens": [bonus, 2, 3], "scores": [0.5, 0.5, keys]}),
    ]


FIRST_DIFFERENCE = Exercise(
    "10-1",
    "Write `first_difference`. It receives the steps of two runs, in the order in which they ran. A step is a tuple of "
    "round, phase, and a dictionary of fields. The fields of a step are in the order in which they were computed, and "
    "each holds a list of numbers. Both runs have the same steps and fields. A value is right if it is within "
    "`tolerance` of the value of the reference: their difference, upwards or downwards, is at most `tolerance`. So "
    "integers must be equal, as it is below 1.\n\n"
    "Return the round, phase, field and index of the *first* wrong value, or None if all are right.\n\n"
    "Hint: a value that was never computed may be NaN. Every comparison with NaN is false.",
    first_difference,
    (
        (_run(0.125, 1.0, -2.0, 5), _run(0.1250001, 1.5, -9.0, 5), 1e-3),
        (_run(0.125, 1.0, -2.0, 5), _run(0.125, nan, -2.0, 6), 1e-3),
        (_run(0.125, 1.0, -2.0, 5), _run(0.125, 1.0, -2.5, 8), 1e-3),
        (_run(0.125, 1.0, -2.0, 5), _run(0.1250001, 1.0, -2.0, 5), 1e-3),
        (_run(0.125, 1.0, -2.0, 5), _run(0.125, 1.0, -2.0, 5), 0.0),
        (_run(0.0, 1.0, -2.0, 5), _run(0.0005, 1.0, -2.0, 5), 1e-3),
        ([(1, "verify", {"logprobs": [-1.0, -2.0, -3.0]})], [(1, "verify", {"logprobs": [-1.0, -2.5, -9.0]})], 0.25),
        ([], [], 1e-3),
    ),
    (
        Mistake(
            _bit_for_bit,
            "Two right implementations add in different orders, so their floats differ in the last digits. An exact "
            "comparison reports rounding as a fault.",
        ),
        Mistake(
            _misses_nan,
            "`abs(right - value) > tolerance` is false for NaN, so NaN passes as right. Ask the other way round: a "
            "value is wrong unless its error is within the tolerance.",
        ),
        Mistake(
            _largest,
            "That is the largest difference. An error grows on its way through the round, so the largest one is an "
            "effect. The cause is at the first one.",
        ),
        Mistake(
            _largest_of_field,
            "The field is right, but the index is that of its largest error. Return the first index whose value is "
            "wrong, as for rounds, phases and fields.",
        ),
        Mistake(
            _signed,
            "Only values that are too large count as wrong. A value may also be too small: take the absolute value of "
            "the difference.",
        ),
        Mistake(
            _relative,
            "The difference is compared with a share of the value. Near 0 that share is almost nothing, so rounding is "
            "reported as a fault. Compare the difference itself with `tolerance`.",
        ),
        Mistake(
            _below,
            "A difference of exactly `tolerance` is still right: with tolerance 0, equal values must pass.",
        ),
        Mistake(
            _by_name,
            "The fields of a step were visited by their names. A field that was computed later may only pass the "
            "error on: keep the order in which the fields were computed.",
        ),
    ),
    "The first wrong value is the nearest to the cause, since all that came before it is right. The condition is "
    "written so that NaN is wrong: not (error <= tolerance).",
)

# What the first difference, or the chain, would show if that were the cause.
WOULD_SHOW = {
    "A": "the logits of a second draft forward would be wrong, in the draft phase",
    "B": "target keys would be wrong after verify, in trees only",
    "C": "it needs top-k or top-p, and these runs are greedy; chains would show it too",
    "D": "positions and slots of the next draft forwards would be wrong",
    "E": "draft keys would be wrong after draft-extend",
    "F": "copied tails of the draft KV would be wrong, in the draft phase",
    "G": "log probabilities would be wrong after verify, in trees only",
    "H": "token ids for draft-extend would be wrong after verify",
}
PLACES = {1: ("draft_extend", ("draft keys", "draft values")), 2: ("verify", ("target keys", "target values")),
          3: ("verify", ("logprobs",))}  # fmt: skip


def diagnose(fault: int) -> tuple[str, str, str]:
    """Name the phase and the field of the first difference, as the pictures do, and the letter of the cause."""
    # begin answer
    answers = {
        1: ("draft_extend", "draft keys", "E"),
        2: ("verify", "target keys", "B"),
        3: ("verify", "logprobs", "G"),
    }
    return answers[fault]
    # end answer


def _effects(fault: int) -> tuple[str, str, str]:
    return {1: ("draft", "scores", "A"), 2: ("draft_extend", "tokens", "H"), 3: ("verify", "tokens", "C")}[fault]


def _neighbours(fault: int) -> tuple[str, str, str]:
    return {1: ("draft_extend", "draft keys", "D"), 2: ("verify", "target keys", "F"), 3: ("verify", "logprobs", "C")}[
        fault
    ]


def compared(answer: Callable[[int], tuple[str, str, str]], fault: int) -> dict[str, str]:
    """Compare each part of a diagnosis, without naming the right one."""
    phase, field, cause = (str(part).strip() for part in answer(fault))
    own_phase, fields = PLACES[fault]
    letter = cause.upper()
    known = f"then {WOULD_SHOW[letter]}" if letter in WOULD_SHOW else f"{cause} is no letter of the list"
    return {
        "the phase": "right" if phase.lower().replace("-", "_") == own_phase else "wrong",
        "the field": "right" if field.lower().replace("_", " ") in fields else "wrong",
        "the cause": "right" if SUSPECTS.get(letter) == NUMBERED[fault] else f"wrong: {known}",
    }


DIAGNOSE = Exercise(
    "10-2",
    "Write `diagnose`. For the number of a fault it returns three texts: the phase of the first difference, the first "
    "wrong field, and the letter of the cause. Take phase and field from the pictures of the trees, exactly as they "
    "are written there.\n\n"
    "A dictionary with three entries is enough.\n\n"
    "Hint: for each suspect, think which field it would make wrong first, and whether a chain would show it too.",
    diagnose,
    ((1,), (2,), (3,)),
    (
        Mistake(
            _effects,
            "These are the places where the faults do harm: fewer accepted drafts, another text. The cause is "
            "earlier; take phase and field of the first difference.",
        ),
        Mistake(
            _neighbours,
            "Phases and fields are right. But each of these causes would make another field wrong first, or it needs a "
            "setting that was not used here.",
        ),
    ),
    "In the fault catalogue these are drafter-keeps-draft-features (vllm#14649), kv-not-moved (sglang#15360) and "
    "logprob-after-compaction (a class of faults around sglang#26866).",
    compared,
)

EXERCISES = (FIRST_DIFFERENCE, DIAGNOSE)
