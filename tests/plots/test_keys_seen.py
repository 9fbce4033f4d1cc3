"""The picture of keys marks the seen ones, and the differences from the first panel."""

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from specsim import plots
from specsim.core.errors import InputError
from specsim.plots.keys_seen import DRAFT_KEY, EXTRA, MISSING, OWN_KEY, PREFIX_KEY, UNSEEN

RIGHT = [range(3, 7), range(4, 8)]  # a window of 4 after 6 tokens
PANELS = {"right": RIGHT, "early start": [range(3, 7), range(3, 8)], "stale": [range(3, 7), range(3, 7)]}


def looks(figure) -> dict:
    """Face and width of the border of every key."""
    patches = (patch for patch in figure.axes[0].patches if str(patch.get_gid()).startswith("key:"))
    return {patch.get_gid(): (to_hex(patch.get_facecolor()).upper(), patch.get_linewidth()) for patch in patches}


def test_keys_are_marked_by_what_they_are():
    found = looks(plots.keys_seen(PANELS, 6))
    expected = {
        **dict.fromkeys(("key:right:0:3", "key:right:1:5", "key:stale:1:5"), PREFIX_KEY),
        **dict.fromkeys(("key:right:0:6", "key:right:1:7", "key:early start:1:7"), OWN_KEY),
        **dict.fromkeys(("key:right:1:6", "key:stale:1:6"), DRAFT_KEY),
        **dict.fromkeys(("key:early start:1:3", "key:stale:1:3"), EXTRA),
        **dict.fromkeys(("key:right:1:3", "key:right:0:7"), UNSEEN),
        "key:stale:1:7": MISSING,
    }
    assert {gid: found[gid] for gid in expected} == {gid: (look.face, look.width) for gid, look in expected.items()}
    assert len(found) == 3 * 2 * 8


def test_alternative_text_names_the_spans():
    figure = plots.keys_seen(PANELS | {"holes": [(1, 3), ()]}, 6)
    assert "early start: step 0 sees positions 3 to 6, step 1 sees positions 3 to 7." in figure.alternative
    assert "holes: step 0 sees position 1, 3, step 1 sees no position." in figure.alternative


@pytest.mark.parametrize(
    ("panels", "length", "name"),
    [({}, 6, "panels"), ({"a": RIGHT, "b": RIGHT[:1]}, 6, "panels"), ({"a": RIGHT}, 0, "length"),
     ({"a": RIGHT}, 63, "length"), ([RIGHT], 6, "panels")],
)  # fmt: skip
def test_bad_panels_are_input_errors(panels, length, name):
    with pytest.raises(InputError) as caught:
        plots.keys_seen(panels, length)
    assert caught.value.name == name
