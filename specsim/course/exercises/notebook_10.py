"""Exercises of notebook 10: find the fault."""

from math import inf, isnan, nan

from specsim.course.exercise import solves
from specsim.course.hidden_faults import compared

Steps = list[tuple[int, str, dict[str, list[float]]]]


def error(right: float, value: float) -> float:
    """Compute the difference of two values, infinite for NaN."""
    return inf if isnan(value) else abs(right - value)


def largest_error(reference: Steps, fast: Steps) -> float:
    """Compute the largest difference of two runs."""
    steps = zip(reference, fast, strict=True)
    return max(max(map(error, fields[name], others[name])) for (*_, fields), (*_, others) in steps for name in fields)


def _run(scores: float, keys: float, logprobs: float, bonus: int) -> Steps:
    """Two phases of a round, and the next draft; keys are computed before logprobs."""
    return [
        (1, "draft", {"tokens": [4, 7, 9], "scores": [0.5, 0.25, scores]}),
        (1, "verify", {"keys": [0.125, keys], "logprobs": [-0.5, -1.0, logprobs], "bonus_tokens": [bonus]}),
        (2, "draft", {"tokens": [bonus, 2, 3], "scores": [0.5, 0.5, keys]}),
    ]


# The first wrong value is the nearest to the cause, since all that came before it is right. The condition is written so
# that NaN is wrong: not (error <= tolerance).
# - `not abs(right - value) <= tolerance` → `right != value`: Two right implementations add in different orders, so
#   their floats differ in the last digits. An exact comparison reports rounding as a fault.
# - `not abs(right - value) <= tolerance` → `abs(right - value) > tolerance`: `abs(right - value) > tolerance` is false
#   for NaN, so NaN passes as right. Ask the other way round: a value is wrong unless its error is within the tolerance.
# - `not abs(right - value) <= tolerance` → `tolerance < error(right, value) == largest_error(reference, fast)`: That is
#   the largest difference. An error grows on its way through the round, so the largest one is an effect. The cause is
#   at the first one.
# - `not abs(right - value) <= tolerance` →
#   `tolerance < error(right, value) == max(map(error, values, fast_fields[field]))`: The field is right, but the index
#   is that of its largest error. Return the first index whose value is wrong, as for rounds, phases and fields.
# - `abs(right - value)` → `value - right`: Only values that are too large count as wrong. A value may also be too
#   small: take the absolute value of the difference.
# - `<= tolerance` → `<= tolerance * max(abs(right), abs(value))`: The difference is compared with a share of the value.
#   Near 0 that share is almost nothing, so rounding is reported as a fault. Compare the difference itself with
#   `tolerance`.
# - `<=` → `<`: A difference of exactly `tolerance` is still right: with tolerance 0, equal values must pass.
# - `fields.items()` → `sorted(fields.items())`: The fields of a step were visited by their names. A field that was
#   computed later may only pass the error on: keep the order in which the fields were computed.
@solves("10-1", (_run(0.125, 1.0, -2.0, 5), _run(0.1250001, 1.5, -9.0, 5), 1e-3),
        (_run(0.125, 1.0, -2.0, 5), _run(0.125, nan, -2.0, 6), 1e-3),
        (_run(0.125, 1.0, -2.0, 5), _run(0.125, 1.0, -2.5, 8), 1e-3),
        (_run(0.125, 1.0, -2.0, 5), _run(0.1250001, 1.0, -2.0, 5), 1e-3),
        (_run(0.125, 1.0, -2.0, 5), _run(0.125, 1.0, -2.0, 5), 0.0),
        (_run(0.0, 1.0, -2.0, 5), _run(0.0005, 1.0, -2.0, 5), 1e-3),
        ([(1, "verify", {"logprobs": [-1.0, -2.0, -3.0]})], [(1, "verify", {"logprobs": [-1.0, -2.5, -9.0]})], 0.25),
        ([], [], 1e-3))  # fmt: skip
def first_difference(
    reference: list[tuple[int, str, dict[str, list[float]]]],
    fast: list[tuple[int, str, dict[str, list[float]]]],
    tolerance: float,
) -> tuple[int, str, str, int] | None:
    """Find the first wrong value: its round, phase, field and index in the field; None if all values are right."""
    for (number, phase, fields), (_, _, fast_fields) in zip(reference, fast, strict=True):
        for field, values in fields.items():
            for index, (right, value) in enumerate(zip(values, fast_fields[field], strict=True)):
                if not abs(right - value) <= tolerance:
                    return number, phase, field, index
    return None


# In the fault catalogue these are drafter-keeps-draft-features (vllm#14649), kv-not-moved (sglang#15360) and
# logprob-after-compaction (a class of faults around sglang#26866).
# - `{1: ("draft", "scores", "A"), 2: ("draft_extend", "tokens", "H"), 3: ("verify", "tokens", "C")}[fault]`: These are
#   the places where the faults do harm: fewer accepted drafts, another text. The cause is earlier; take phase and field
#   of the first difference.
# - `"E"` → `"D"`, `"B"` → `"F"`, `"G"` → `"C"`: Phases and fields are right. But each of these causes would make
#   another field wrong first, or it needs a setting that was not used here.
@solves("10-2", (1,), (2,), (3,), observe=compared)
def diagnose(fault: int) -> tuple[str, str, str]:
    """Name the phase and the field of the first difference, as the pictures do, and the letter of the cause."""
    answers = {
        1: ("draft_extend", "draft keys", "E"),
        2: ("verify", "target keys", "B"),
        3: ("verify", "logprobs", "G"),
    }
    return answers[fault]
