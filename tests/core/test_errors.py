"""Checks of values: choices of a dataclass, and the file that a value comes from."""

from dataclasses import dataclass
from typing import Literal

import pytest

from specsim.core.errors import InputError, require_choices


@dataclass(frozen=True)
class Choices:
    mode: Literal["a", "b"] = "a"
    other: Literal["c"] | None = None
    text: str = "any"


def test_every_field_of_a_few_texts_is_checked():
    for right in (Choices(), Choices("b", "c", "")):
        require_choices(right)
    for name, wrong in (("mode", Choices("c")), ("mode", Choices(None)), ("other", Choices(other="a"))):
        with pytest.raises(InputError, check=lambda error, name=name: error.name == name):
            require_choices(wrong)


def test_an_error_names_its_file_once():
    error = InputError("topk", 0, "an integer of at least 1").within("a.json")
    assert (error.name, error.value) == ("topk", 0)
    assert str(error.within("a.json")).count("a.json") == 1
