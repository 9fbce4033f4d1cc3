"""Checks of exercises accept solutions, refuse starters and each wrong answer with its sentence, and never raise."""

import re
import sys
from fractions import Fraction

import pytest

from specsim.core.errors import InputError
from specsim.course import check, exercise, names, solution, starter
from specsim.course.check import formatted, same
from specsim.course.exercise import solves

NAMES = names()
MISTAKES = [(name, index) for name in NAMES for index in range(len(exercise(name).mistakes))]


def test_names_and_wrong_answers_are_complete():
    assert sorted(set(NAMES)) == NAMES
    assert all(re.fullmatch(r"\d\d-\d+", name) for name in NAMES)
    assert len(MISTAKES) >= 253


@pytest.mark.parametrize("name", NAMES)
def test_solution_is_accepted_and_starter_is_not(name):
    solved = exercise(name)
    result = check(name, solved.solution)
    assert result.is_right, result
    assert result.reasons == (solved.explanation,)
    assert solved.explanation
    namespace = dict(solved.solution.__globals__)
    exec(starter(solved), namespace)
    result = check(name, namespace[solved.solution.__name__])
    assert result.status == "not solved yet"
    assert not result.is_right


@pytest.mark.parametrize("name", NAMES)
def test_starter_gives_nothing_away(name):
    first, source = starter(exercise(name)), solution(name).source
    assert exercise(name).solution.__doc__ in first
    assert first.startswith(source.split("\n", maxsplit=1)[0])
    assert "answer" not in first.replace('"your answer"', "")
    assert not {*source.splitlines()} <= {*first.splitlines()}
    assert repr(solution(name)).startswith(source)


@pytest.mark.parametrize(("name", "index"), MISTAKES)
def test_wrong_answer_is_refused_with_its_own_sentence(name, index):
    mistakes = exercise(name).mistakes
    result = check(name, mistakes[index].answer)
    assert result.status == "not right yet"
    assert result.reasons[1:] == (mistakes[index].reason,)
    assert [mistake.reason for mistake in mistakes].count(mistakes[index].reason) == 1


def raises(*_):
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (raises, "raises KeyError: 'lost'"),
        (lambda *_: sys.exit(), "raises SystemExit"),
        (lambda: 1, "raises TypeError"),
        (lambda *_: None, "gives None; it should give 5/8"),
        (lambda *_: "x" * 1000, "xx…; it should"),
        (lambda *_: "<b>x", "gives '<b>x'"),
        (0.625, "The answer is 0.625; give the function"),
    ],
)
def test_any_answer_gets_a_result_in_words(answer, words):
    result = check("03-1", answer)
    assert result.status == "not right yet"
    assert words in repr(result)
    assert "not right yet" in result._repr_html_()
    assert "<b>x" not in result._repr_html_()
    assert check("03-1", None).status == check("03-1", ...).status == "not solved yet"


def test_mistake_is_found_in_an_answer_that_raises_elsewhere():
    solved = exercise("03-1")
    mistake = solved.mistakes[0]

    def answer(target_prob, draft_prob):
        if not all(draft_prob):
            raise ZeroDivisionError
        return mistake.answer(target_prob, draft_prob)

    def raises_or_right(target_prob, draft_prob):
        return solved.solution(target_prob, draft_prob) if all(draft_prob) else answer(target_prob, draft_prob)

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
    assert not check("03-1", lambda target_prob, _: target_prob.clear()).is_right
    assert check("03-1", exercise("03-1").solution).is_right


def test_observations_are_compared():
    assert same([1, Fraction(1, 2)], (1.0, 0.5000000001))
    assert same({"a": [1]}, {"a": (1,)})
    assert not same(Fraction(1, 2), 0.51)
    assert not same([1, 2], [1])
    assert not same({"a": 1}, {"b": 1})
    assert not same(1, "1")
    assert not same(ValueError("a"), 1)
    assert formatted([Fraction(1, 3), 0.123456]) == "[1/3, 0.1235]"


# So it is.
# - `a - b` → `a * b`: No.
def add(a, b):
    """Add."""
    return a + b


# So it is.
# - `a * b` is wrong.
def plus(a, b):
    """Add."""
    return a + b


@pytest.mark.parametrize(("solution", "words"), [(add, "has no 'a - b'"), (plus, "no code with a sentence: `a")])
def test_wrong_answer_that_does_not_fit_is_refused(solution, words):
    with pytest.raises(ValueError, match=words):
        solves("03-9", (1, 2))(solution)
