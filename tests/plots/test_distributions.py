"""Pictures of distributions show the probabilities, and areas that sum to the target's."""

import pytest

pytest.importorskip("matplotlib")

from collections import defaultdict

from specsim import plots
from specsim.core.errors import InputError

TARGET = (5 / 8, 2 / 8, 1 / 8)
DRAFT = (3 / 8, 1 / 8, 4 / 8)
TOKENS = ("owl", "cat", "dog")


def patches(figure) -> dict:
    return {artist.get_gid(): artist for artist in figure.axes[0].patches if artist.get_gid()}


def test_bars_are_as_high_as_the_probabilities():
    figure = plots.distributions({"target": TARGET, "draft": DRAFT}, TOKENS)
    heights = {gid: bar.get_height() for gid, bar in patches(figure).items()}
    expected = {f"bar:{name}:{token}": prob for name, row in (("target", TARGET), ("draft", DRAFT))
                for token, prob in zip(TOKENS, row, strict=True)}  # fmt: skip
    assert heights == expected
    assert "draft: owl 0.375, cat 0.125, dog 0.5." in figure.alternative


def test_the_kind_names_what_is_drawn():
    figure = plots.distributions({"target": (0.25, 0.75)}, ("aa", "ab"), kind="text")
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_title("left")) == ("text", "probability of each text")
    assert figure.alternative.startswith("Probability of each text.")


@pytest.mark.parametrize(
    ("target", "draft"),
    [(TARGET, DRAFT), (DRAFT, TARGET), (TARGET, TARGET), ((0, 0, 1), (0.5, 0.5, 0)), ((1, 0, 0), (0, 0, 1))],
)
def test_area_of_every_token_is_its_target_probability(target, draft):
    figure = plots.rejection(target, draft, TOKENS)
    areas = defaultdict(float)
    kept = 0.0
    for gid, area in patches(figure).items():
        kind, token, _ = gid.split(":")
        areas[token] += area.get_width() * area.get_height()
        kept += (kind == "kept") * area.get_width() * area.get_height()
    assert [areas[token] for token in TOKENS] == pytest.approx(target)
    assert kept == pytest.approx(sum(map(min, target, draft)))
    assert f"kept on {kept:.4g} of the area" in figure.alternative


@pytest.mark.parametrize(
    ("target", "draft", "tokens", "name"),
    [
        ((0.5, 0.4), (0.5, 0.5), ("a", "b"), "target_prob"),
        ((0.5, 0.5), (0.5, 0.5, 0), ("a", "b"), "draft_prob"),
        ((0.5, 0.5), (1.5, -0.5), ("a", "b"), "draft_prob"),
        ((1,) + (0,) * 5, (1,) + (0,) * 5, "abcdef", "tokens"),
    ],
)
def test_bad_distributions_are_input_errors(target, draft, tokens, name):
    with pytest.raises(InputError) as caught:
        plots.rejection(target, draft, tokens)
    assert caught.value.name == name


def test_too_many_distributions_are_an_input_error():
    with pytest.raises(InputError):
        plots.distributions({str(at): TARGET for at in range(6)}, TOKENS)
