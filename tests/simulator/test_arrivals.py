"""Gamma and diurnal arrivals, and lognormal lengths."""

import numpy as np
import pytest

from specsim.core.errors import InputError
from specsim.simulator.workload import Arrivals, draw, open_loop, poisson

SIZE = 20_000


def times(**shape: float) -> np.ndarray:
    return open_loop(SIZE, 4.0, 10, 10, 3, Arrivals(**shape)).arrivals_s


def test_the_default_is_poisson():
    assert (times() == poisson(SIZE, 4.0, 10, 10, 3).arrivals_s).all()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_a_gamma(burstiness):
    gaps = np.diff(times(burstiness=burstiness))
    assert gaps.mean() == pytest.approx(0.25, rel=5 / np.sqrt(SIZE * burstiness))  # 5 standard deviations
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_swing_moves_arrivals_to_the_first_half():
    """Half a period of 1 + 0.8 sin(2π t / 500) has 1 + 0.8 · 2/π of the mean."""
    plain, swung = times(), times(swing=0.8, period=500.0)
    periods = int(plain[-1] // 500)
    inside = swung[swung < 500 * periods]
    first = (inside % 500 < 250).mean()
    assert first == pytest.approx((1 + 0.8 * 2 / np.pi) / 2, abs=5 / np.sqrt(4 * len(inside)))
    assert (np.diff(swung) >= 0).all()
    expected = swung + 0.8 * 500 / (2 * np.pi) * (1 - np.cos(2 * np.pi * swung / 500))
    assert expected == pytest.approx(plain, rel=1e-9)


def test_lognormal_lengths_have_their_mean_and_variation():
    uniforms = (np.arange(SIZE) + 0.5) / SIZE
    drawn = draw("prompt_tokens", "lognormal:512:0.8", uniforms)
    assert drawn.mean() == pytest.approx(512, rel=0.01)
    assert drawn.std() / drawn.mean() == pytest.approx(0.8, rel=0.02)
    assert np.median(drawn) == pytest.approx(512 / np.sqrt(1 + 0.8**2), abs=1)
    assert draw("prompt_tokens", "lognormal:1:3", np.array([0.0]))[0] == 1


@pytest.mark.parametrize(
    "text", ["lognormal:512", "lognormal:512:0.8:1", "lognormal:-1:1", "lognormal:1:0", "normal:5:1", "lognormal:a:b"]
)
def test_bad_lengths_are_refused(text):
    with pytest.raises(InputError, check=lambda error: error.name == "output_tokens"):
        draw("output_tokens", text, np.zeros(1))


@pytest.mark.parametrize(("name", "value"), [("burstiness", 0), ("swing", 1.5), ("swing", -0.1), ("period", 0)])
def test_bad_shapes_are_refused(name, value):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        Arrivals(**{name: value})
