"""The page of held-out errors is what its tables give today."""

import re

import pytest

from specsim.maintain.page import GUIDE
from specsim.maintain.tables import CODE_REGIONS

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
PAGE = (GUIDE / "held-out.md").read_text(encoding="utf-8")


def numbers(text: str) -> list[float]:
    return [float(each) for each in NUMBER.findall(text)]


# Every published table is calibrated again, which takes longer than all the others together.
SIX_CELLS = pytest.param("six-cells", marks=pytest.mark.whole)


@pytest.mark.parametrize("name", [SIX_CELLS, "left-out", "speed-ups", "choices", "profiles", "identities"])
def test_a_table_is_that_of_its_figures(name):
    kept = PAGE.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0].strip()
    made = CODE_REGIONS[name]()
    assert NUMBER.sub("#", kept) == NUMBER.sub("#", made)
    assert numbers(kept) == pytest.approx(numbers(made), rel=0.05, abs=2)
