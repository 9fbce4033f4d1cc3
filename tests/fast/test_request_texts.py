"""Structures over requests' tokens: extended where the tokens grow, made again where they differ."""

import pytest

from specsim.fast.drafters.counted_trie import RequestTexts


class Recorded:
    """A structure that notes what is appended."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def append(self, token: int) -> None:
        self.text.append(token)


def test_growing_text_extends_its_structure():
    texts = RequestTexts(Recorded)
    first = texts.follow(0, [1, 2])
    other = texts.follow(1, [1, 2])
    assert texts.follow(0, (1, 2, 3)) is first
    assert texts.follow(0, (1, 2, 3)) is first
    assert first.text == [1, 2, 3]
    assert texts.follow(1, [1, 2]) is other is not first
    assert other.text == [1, 2]


@pytest.mark.parametrize("tokens", [[1, 3, 3], [1], [], [2, 2, 3, 4]])
def test_other_text_makes_a_structure_again(tokens):
    texts = RequestTexts(Recorded)
    first = texts.follow(0, [1, 2, 3])
    again = texts.follow(0, tokens)
    assert again is not first
    assert (again.text, first.text) == (tokens, [1, 2, 3])


def test_dropped_request_is_forgotten():
    texts = RequestTexts(Recorded)
    first = texts.follow(0, [1])
    texts.drop(0)
    texts.drop(7)
    assert texts.follow(0, [1]) is not first
