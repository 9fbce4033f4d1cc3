"""Numbers of files: finite, in range and of their kind, or named by key and place."""

import pytest

from specsim.core.errors import InputError
from specsim.core.limits import MOST_COUNT, parse_number, read_integer, read_number, read_positive


def is_named(error: InputError) -> bool:
    return error.name == "rounds" and "a.json" in str(error)


def test_integers_may_be_written_as_floats():
    assert (read_integer(4.0, "rounds", "a.json"), read_number(4, "rounds", "a.json")) == (4, 4.0)
    assert type(read_integer(4.0, "rounds", "a.json")) is int
    assert [parse_number(text) for text in ("12", " 1.5 ", "1e3", "1_0", "x")] == [12, 1.5, 1000, "1_0", "x"]
    assert parse_number("9" * 18) == 10**18 - 1


@pytest.mark.parametrize("value", [None, True, "4", [4], {}, float("nan"), float("inf"), 10**400, -1])
def test_a_value_that_is_no_number_is_refused(value):
    for read in (read_integer, read_number, read_positive):
        with pytest.raises(InputError, check=is_named):
            read(value, "rounds", "a.json")


@pytest.mark.parametrize(
    ("read", "value", "limits"),
    [
        (read_integer, 4.5, ()),
        (read_integer, MOST_COUNT + 1, ()),
        (read_integer, 4, (5,)),
        (read_integer, 4, (1, 3)),
        (read_number, 1.5, (0, 1)),
        (read_positive, 0, ()),
    ],
)
def test_a_number_outside_its_limits_is_refused(read, value, limits):
    with pytest.raises(InputError, check=is_named):
        read(value, "rounds", "a.json", *limits)
