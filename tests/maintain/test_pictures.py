"""Pictures of README and the guide: the committed files are what the command draws."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from notebooks.guide.pages import pictures

NAMES = sorted(path.name for path in pictures.IMAGES.glob("*.svg"))
MOST_BYTES = 120_000


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    pictures.write(folder)
    return folder


def texts(path: Path) -> list[str]:
    """Texts of a picture; glyphs are drawn as outlines, each text named in a comment."""
    return re.findall(r"<!-- (.+?) -->", path.read_text(encoding="utf-8"))


def test_every_picture_is_committed(drawn):
    assert sorted(path.name for path in drawn.iterdir()) == NAMES != []


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_picture_is_the_one_that_is_drawn(name, drawn):
    """By its texts: outlines differ between versions of matplotlib."""
    assert texts(drawn / name) == texts(pictures.IMAGES / name)
    assert len(texts(drawn / name)) > 10


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_small_and_have_a_background(name):
    """White, so that dark ink is readable on a page of any colour."""
    path = pictures.IMAGES / name
    assert path.stat().st_size < MOST_BYTES
    patch = next(each for each in ElementTree.parse(path).iter() if each.get("id") == "patch_1")
    assert "fill: #ffffff" in (patch[0].get("style") or "")


def test_the_tree_shows_an_accepted_path_and_a_bonus():
    svg = (pictures.IMAGES / "token-tree.svg").read_text(encoding="utf-8")
    assert svg.count('id="node:') == 8
    assert 'id="bonus"' in svg
    assert any("num_accepted_drafts 3" in text for text in texts(pictures.IMAGES / "token-tree.svg"))


def test_a_picture_drawn_twice_is_the_same():
    result = {
        "shape": "a-shape",
        "runs": [{"versions": {"gpu": "a GPU"}}],
        "rows": [
            {
                "setting": {"tree": tree, "L": pictures.CONTEXT, "requests": requests},
                "timings": {"ours": {"median_us": 2e3 * requests}},
                "roofline_bound_us": 1e3 * requests,
            }
            for tree in pictures.NAMES
            for requests in (1, 4)
        ],
    }
    first, second = (pictures.svg(pictures.round_time(result)) for _ in range(2))
    assert first == second
