"""The page of pictures shows everything that specsim.plots draws."""

import re
from xml.etree import ElementTree

import pytest

from notebooks.guide.pages.gallery import EXAMPLES, gallery_pages
from specsim import plots


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return gallery_pages()


def test_every_function_that_draws_has_an_example():
    assert set(EXAMPLES) == set(plots.__all__) - {"Slot", "slots"}


def test_the_page_links_every_picture_with_an_alternative_text(pages):
    linked = re.findall(r"!\[(.+)\]\((generated/pictures/\w+\.svg)\)", pages["pictures.md"])
    assert {path for _, path in linked} == set(pages) - {"pictures.md"}
    assert all(len(text) > 20 for text, _ in linked)
    for path in set(pages) - {"pictures.md"}:
        ElementTree.fromstring(pages[path])
