"""Checks of exercises accept solutions, reject starters and usual mistakes with their reasons, and never raise."""

import re
from fractions import Fraction

import pytest

from specsim.core.errors import InputError
from specsim.course import check, exercise, names, solution, starter
from specsim.course.check import formatted, same
from specsim.course.exercise import solves

NAMES = names()
MISTAKES = [(name, at) for name in NAMES for at in range(len(exercise(name).mistakes))]


def started(name: str):
    """The function that a starter defines."""
    chosen = exercise(name)
    namespace = dict(chosen.solution.__globals__)
    exec(starter(chosen), namespace)
    return namespace[chosen.solution.__name__]


@pytest.mark.parametrize("name", NAMES)
def test_solution_is_accepted(name):
    result = check(name, exercise(name).solution)
    assert result.is_right, result
    assert result.reasons == (exercise(name).explanation,)


@pytest.mark.parametrize("name", NAMES)
def test_starter_is_not_solved_yet(name):
    result = check(name, started(name))
    assert result.status == "not solved yet"
    assert not result.is_right


@pytest.mark.parametrize(("name", "at"), MISTAKES)
def test_mistake_is_rejected_with_its_reason(name, at):
    mistake = exercise(name).mistakes[at]
    result = check(name, mistake.answer)
    assert result.status == "not right yet"
    assert len(result.reasons) == 2
    assert result.reasons[1] == mistake.reason


@pytest.mark.parametrize("name", NAMES)
def test_exercise_is_complete(name):
    chosen = exercise(name)
    assert re.fullmatch(r"\d\d-\d+", name)
    assert len(chosen.mistakes) >= 2
    assert len({each.reason for each in chosen.mistakes}) == len(chosen.mistakes)
    assert chosen.question.strip()
    assert chosen.explanation.strip()
    assert chosen.solution.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_starter_gives_nothing_away(name):
    given, whole = starter(exercise(name)), solution(name).source
    assert "NotImplementedError" not in whole
    assert "answer" not in re.sub(r'"your answer"', "", given)
    assert given.startswith(whole.split("\n", maxsplit=1)[0])
    hidden = [line for line in whole.splitlines() if line not in given.splitlines()]
    assert hidden
    assert repr(solution(name)).startswith(whole)


def test_names_are_unique_and_in_order():
    assert NAMES
    assert sorted(set(NAMES)) == NAMES


def raises(*_):
    raise KeyError("lost")


def stops(*_):
    raise SystemExit


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (raises, "raises KeyError: 'lost'"),
        (stops, "raises SystemExit"),
        (lambda: 1, "raises TypeError"),
        (lambda *_: None, "gives None; it should give 5/8"),
        (lambda *_: "x" * 1000, "xx…; it should"),
        (0.625, "The answer is 0.625; give the function"),
    ],
)
def test_any_answer_gets_a_result_in_words(answer, words):
    result = check("03-1", answer)
    assert result.status == "not right yet"
    assert words in repr(result)
    assert "not right yet" in result._repr_html_()


@pytest.mark.parametrize("answer", [None, ...])
def test_no_answer_is_not_solved_yet(answer):
    assert check("03-1", answer).status == "not solved yet"


def test_mistake_is_found_in_an_answer_that_raises_elsewhere():
    chosen = exercise("03-1")
    mistake = chosen.mistakes[0]

    def answer(target_prob, draft_prob):
        if not all(draft_prob):
            raise ZeroDivisionError
        return mistake.answer(target_prob, draft_prob)

    def raises_or_right(target_prob, draft_prob):
        return chosen.solution(target_prob, draft_prob) if all(draft_prob) else answer(target_prob, draft_prob)

    assert check("03-1", answer).reasons[1:] == (mistake.reason,)
    assert len(check("03-1", raises_or_right).reasons) == 1
    assert len(check("03-1", raises).reasons) == 1


def test_unknown_exercise_is_an_input_error():
    with pytest.raises(InputError) as caught:
        check("99-1", None)
    assert caught.value.name == "exercise"
    with pytest.raises(InputError):
        solution("03")


def test_answer_cannot_change_the_cases():
    def clears(target_prob, draft_prob):
        target_prob.clear()
        return 0

    assert not check("03-1", clears).is_right
    assert check("03-1", exercise("03-1").solution).is_right


def test_html_is_escaped():
    assert "<b>x" not in check("03-1", lambda *_: "<b>x")._repr_html_()


def test_observations_are_compared():
    assert same([1, Fraction(1, 2)], (1.0, 0.5000000001))
    assert same({"a": [1]}, {"a": (1,)})
    assert not same(Fraction(1, 2), 0.51)
    assert not same([1, 2], [1])
    assert not same({"a": 1}, {"b": 1})
    assert not same(1, "1")
    assert not same(ValueError("a"), 1)
    assert formatted([Fraction(1, 3), 0.123456]) == "[1/3, 0.1235]"


# Add.
#
# Why: So it is.
#
# - `a - b` → `a * b`: No.
def add(a, b):
    """Add."""
    return a + b


# Add.
#
# Why: So it is.
#
# - `a * b` is wrong.
def plus(a, b):
    """Add."""
    return a + b


@pytest.mark.parametrize(("solution", "words"), [(add, "has no 'a - b'"), (plus, "no code with a sentence: `a")])
def test_wrong_answer_that_does_not_fit_is_refused(solution, words):
    with pytest.raises(ValueError, match=words):
        solves("03-9", (1, 2))(solution)
