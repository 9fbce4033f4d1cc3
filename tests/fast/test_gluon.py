"""Fields of a value are constants of a compilation."""

import json
from typing import NamedTuple

import pytest
from triton.experimental.gluon import language as gl

from specsim.fast.runtime.gluon import Constants


class Sizes(NamedTuple):
    rows: int
    is_gated: bool


def test_fields_are_constants():
    constants = Constants(Sizes(7, False))
    assert constants == Constants(Sizes(7, False))
    assert constants != Constants(Sizes(7, True))
    assert json.loads(json.dumps(constants)) == "Sizes(rows=7, is_gated=False)"  # as Triton's hooks write it
    assert isinstance(constants.rows, gl.constexpr)
    assert (constants.rows.value, constants.is_gated.value) == (7, False)


@pytest.mark.parametrize("name", ["columns", "_rows"])
def test_nothing_else_is(name):
    with pytest.raises(AttributeError):
        getattr(Constants(Sizes(7, False)), name)
