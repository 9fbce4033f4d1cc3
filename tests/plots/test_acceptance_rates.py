"""Acceptance of records is drawn with intervals, and said in words."""

import numpy as np
import pytest

from specsim import plots
from specsim.acceptance.interval import rate_intervals
from specsim.core.errors import InputError
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts

COUNTS = [Counts.of_rounds([3, 1, 0, 2], 3), Counts.of_rounds([0, 1, 3], 3), Counts.of_rounds([2, 2], 3)]
MEASURED = AcceptanceRecord.of_counts(COUNTS, "a file", "a tool", "as it counts.", is_by_request=True)
PUBLISHED = AcceptanceRecord("a table", "a tool", "as it counts.", 1.75, rates=(0.5, 0.25))


def lines(figure) -> dict[str, np.ndarray]:
    return {line.get_gid(): np.asarray(line.get_ydata()) for axes in figure.axes for line in axes.lines}


def test_rates_are_drawn_by_position_and_depth():
    found = lines(plots.acceptance_rates({"mine": MEASURED, "theirs": PUBLISHED}))
    assert found["unconditional:mine"] == pytest.approx(MEASURED.rates)
    assert found["conditional:mine"] == pytest.approx(MEASURED.conditional)
    assert found["conditional:theirs"] == pytest.approx([0.5, 0.5])
    assert len(found) == 4


def test_intervals_are_bars_where_there_are_counts():
    for name, record, number in (("mine", MEASURED, 1), ("theirs", PUBLISHED, 0)):
        left, right = plots.acceptance_rates({name: record}).axes
        assert [len(axes.collections) for axes in (left, right)] == [number] * 2
    left, _ = plots.acceptance_rates({"mine": MEASURED}).axes
    ends = [segment[:, 1].tolist() for segment in left.collections[0].get_segments()]
    assert ends == [pytest.approx([band.low, band.high]) for band in rate_intervals(MEASURED)]


def test_a_picture_says_its_figures_in_words():
    text = plots.acceptance_rates({"mine": MEASURED, "theirs": PUBLISHED}).alternative
    assert "theirs accepts 1.75 tokens a round" in text
    assert "is 0.50, 0.25; of those that reach it, 0.50, 0.50." in text
    assert text.endswith("Bars are 95% intervals.")
    assert "intervals" not in plots.acceptance_rates({"theirs": PUBLISHED}).alternative


@pytest.mark.parametrize(
    ("records", "name"),
    [
        (None, "records"),
        ({}, "records"),
        ({"a": 0.5}, "records"),
        ({"a": AcceptanceRecord("", "", "", 2.0)}, "a"),
        (dict.fromkeys("abcdef", PUBLISHED), "records"),
    ],
)
def test_what_cannot_be_drawn_is_refused(records, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        plots.acceptance_rates(records)
