"""The page of held-out errors is what its tables give today."""

import re

import pytest

from specsim.maintain.page import GUIDE
from specsim.maintain.tables import CODE_REGIONS

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
PAGE = (GUIDE / "held-out.md").read_text(encoding="utf-8")


def numbers(text: str) -> list[float]:
    return [float(each) for each in NUMBER.findall(text)]


# Published tables are calibrated again, which takes longer than all else; tests/simulator calibrates some of them.
CALIBRATED = [pytest.param(name, marks=pytest.mark.whole) for name in ("six-cells", "left-out")]


@pytest.mark.parametrize("name", [*CALIBRATED, "speed-ups", "choices", "profiles", "identities"])
def test_a_table_is_that_of_its_figures(name):
    kept = PAGE.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0].strip()
    made = CODE_REGIONS[name]()
    assert NUMBER.sub("#", kept) == NUMBER.sub("#", made)
    assert numbers(kept) == pytest.approx(numbers(made), rel=0.05, abs=2)
