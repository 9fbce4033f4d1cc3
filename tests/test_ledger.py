import re

import pytest

from specsim.ledger import PAPERS, ledger, tables
from specsim.simulator.reproduce import reproduction

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e-?\d+)?")
PAGES = {name: path for path in PAPERS.glob("*/notes.md") for name in tables(path.read_text(encoding="utf-8"))}


def differences(kept: str, made: str) -> list[tuple[str, str]]:
    """Lines whose words differ, or whose numbers differ by more than another machine's rounding: 2 %, or 0.15."""
    pairs = zip(kept.splitlines(), made.splitlines(), strict=True)
    return [(old, new) for old, new in pairs if NUMBER.sub("#", old) != NUMBER.sub("#", new) or not _close(old, new)]


def _close(old: str, new: str) -> bool:
    values = [[float(number) for number in NUMBER.findall(line)] for line in (old, new)]
    return values[0] == pytest.approx(values[1], rel=0.02, abs=0.15)


@pytest.mark.parametrize("name", PAGES)
def test_a_ledger_says_what_its_table_comes_to(name):
    page = PAGES[name].read_text(encoding="utf-8")
    kept = page.split(f"<!-- ledger {name} -->\n")[1].split(f"<!-- /ledger {name} -->")[0]
    made = ledger(reproduction(name)())
    assert differences(kept, made) == []


def test_every_table_that_is_not_exact_has_its_ledger():
    assert {"leviathan_table4", "sglang_6995", "spec_bench", "vllm_20780"} <= set(PAGES)


@pytest.mark.parametrize("made", ["| a | 2.30 |", "| b | 2.00 |", "| a | 2.00 | 1 |"])
def test_another_figure_or_word_is_a_difference(made):
    assert differences("| a | 2.00 |", made)
    assert differences(made, made) == []
