"""Pictures of losses show every step and the moving mean."""

import pytest

pytest.importorskip("matplotlib")

import numpy as np

from specsim import plots
from specsim.core.errors import InputError


def test_bold_line_is_the_moving_mean():
    row = [float(step) for step in range(20, 0, -1)]
    figure = plots.losses({"right": row, "short": [3.0, 1.0]})
    lines = {line.get_gid(): np.asarray(line.get_ydata()).tolist() for line in figure.axes[0].lines}
    assert lines["loss:right"][:2] == [20, 19.5]
    assert lines["loss:right"][-1] == pytest.approx(sum(row[-10:]) / 10)
    assert lines["loss:short"] == [3, 2]
    assert row in [np.asarray(line.get_ydata()).tolist() for line in figure.axes[0].lines]
    assert "right: 15.5 at first, 5.5 after 20 steps." in figure.alternative


BAD = ({}, {"empty": []}, {"broken": [float("nan")]}, [1.0], {str(place): [1.0] for place in range(6)})


@pytest.mark.parametrize("runs", BAD)
def test_bad_losses_are_input_errors(runs):
    with pytest.raises(InputError):
        plots.losses(runs)
