"""The picture of a first divergence: what was equal before it, and both values."""

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgba

from specsim import plots
from specsim.correctness.differential.result import Divergence
from specsim.plots.divergence import EQUAL, WRONG


def drawn(figure, look=None) -> list[str]:
    """Cells of the picture, or those of one look, in order."""
    cells = [artist for artist in figure.axes[0].get_children() if artist.get_gid() not in (None, "legend")]
    return [each.get_gid() for each in cells if look is None or each.get_facecolor() == to_rgba(look.face)]


@pytest.mark.parametrize(
    ("number", "phase", "wrong", "equal"),
    [
        (0, "prefill", ["prefill:0"], []),
        (2, "verify", ["verify:2"], ["prefill:0", "draft:1", "verify:1", "draft_extend:1", "draft:2"]),
        (1, "round", ["draft:1", "verify:1", "draft_extend:1"], ["prefill:0"]),
    ],
)
def test_phases_before_the_first_difference_are_drawn_as_equal(number, phase, wrong, equal):
    figure = plots.divergence(Divergence("cell 7", number, phase, 1, 3, "predict", 5, 6))
    assert drawn(figure, WRONG) == wrong
    assert drawn(figure, EQUAL) == equal


def test_both_values_are_written_and_said_in_words():
    found = Divergence("cell 7", 40, "verify", 1, 3, "predict", [1, 2, 3], [1, 2, 4])
    figure = plots.divergence(found)
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"reference: [1, 2, 3]", "fast: [1, 2, 4]", "predict"} <= texts
    assert "verify:28" not in drawn(figure)
    assert figure.alternative == f"First divergence. {found}."


def test_the_name_of_a_field_is_written_with_its_blanks():
    figure = plots.divergence(Divergence("cell 7", 1, "verify", 1, 3, "target keys", 5, 6))
    assert "target keys" in {text.get_text() for text in figure.axes[0].texts}
