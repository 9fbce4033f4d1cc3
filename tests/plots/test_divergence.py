"""The picture of a first divergence: what was equal before it, and both values."""

import pytest

from specsim import plots
from specsim.correctness.differential.result import Divergence


def looks(figure) -> dict:
    patches = (artist for artist in figure.axes[0].get_children() if artist.get_gid())
    return {artist.get_gid(): artist.get_linewidth() for artist in patches if artist.get_gid() != "legend"}


@pytest.mark.parametrize(
    ("number", "phase", "wrong", "equal"),
    [
        (0, "prefill", ["prefill:0"], []),
        (1, "verify", ["verify:1"], ["prefill:0", "draft:0", "verify:0", "draft_extend:0", "draft:1"]),
        (1, "round", ["draft:1", "verify:1", "draft_extend:1"], ["prefill:0", "draft:0"]),
    ],
)
def test_phases_before_the_first_difference_are_drawn_as_equal(number, phase, wrong, equal):
    figure = plots.divergence(Divergence("cell 7", number, phase, 1, 3, "predict", 5, 6))
    widths = looks(figure)
    assert [gid for gid, width in widths.items() if width == 2.0] == wrong
    assert set(equal) <= set(widths)


def test_both_values_are_written_and_said_in_words():
    found = Divergence("cell 7", 40, "verify", 1, 3, "predict", [1, 2, 3], [1, 2, 4])
    figure = plots.divergence(found)
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"reference: [1, 2, 3]", "fast: [1, 2, 4]", "predict"} <= texts
    assert "verify:28" not in looks(figure)
    assert figure.alternative == f"First divergence. {found}."
