"""The command that prints the errors of continued accept lengths."""

import pytest

from papers.inferencex.reproduce import show
from specsim.core.display import stdout_console
from specsim.simulator.continuation import RULES, coverage, margin, misses, published_series


def test_errors_are_printed_by_rule_and_series(capsys):
    show(stdout_console())
    lines = capsys.readouterr().out.splitlines()
    words = " ".join(" ".join(lines).split())
    for name in RULES:
        assert sum(line.startswith(f"{name}  ") for line in lines) == 2
    for series in published_series():
        (line,) = [line for line in lines if line.startswith(f"{series.name}  ") and series.source in line]
        found = [abs(miss.error) for miss in misses(series, least_given=2)]
        assert line.split()[-2:] == [f"{max(found):.2%}", str(len(found))]
    assert f"hold {coverage():.1%} of the lengths" in words
    assert f"{margin(3, 1):.1%}" in words


@pytest.mark.parametrize("given", [1, 2, 3])
def test_margins_without_a_series_are_those_of_the_others(given):
    everything = {margin(given, 2, str(series)) for series in published_series()}
    assert len(everything) > 1
    assert min(everything) <= margin(given, 2) <= max(everything)
