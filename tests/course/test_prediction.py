"""Predictions are scored against the result, within their tolerance, and listed."""

import pytest

from specsim.core.errors import InputError
from specsim.course import predict, scores


def test_tolerance_is_a_share_of_the_result():
    guess = predict("How many?", 9)
    assert guess.score(10).is_close
    assert not guess.score(10.1).is_close
    assert repr(guess.score(20)) == "You said 9, it is 20: off by 11, not within the tolerance of 2."


def test_least_tolerance_holds_for_a_result_of_zero():
    assert predict("How many then?", 2, at_least=2).score(0).is_close
    assert not predict("How many then?", 2).score(0).is_close
    assert predict("Exactly?", 3, within=0).score(3).is_close


def test_scores_keep_the_last_of_each_question():
    predict("First?", 1).score(1)
    predict("Second?", 1).score(2)
    predict("First?", 5).score(1)
    found = {score.question: score for score in scores()}
    assert (found["First?"].guess, found["Second?"].actual) == (5, 2)
    assert [score.question for score in scores()].count("First?") == 1
    assert f"{sum(score.is_close for score in scores())} of {len(scores())}" in repr(scores())
    assert "<td>First?</td>" in scores()._repr_html_()


@pytest.mark.parametrize("guess", [..., None, "3", float("nan"), True])
def test_guess_must_be_a_number(guess):
    with pytest.raises(InputError) as caught:
        predict("How many?", guess)
    assert caught.value.name == "guess"
