"""README is a front page: short, with two pictures, and links that lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 700


def test_the_front_page_is_short():
    assert len(README.split()) <= MOST_WORDS


def test_the_front_page_has_two_pictures_and_no_targets():
    assert len(re.findall(r"!\[.+?\]\((.+?\.svg)\)", README)) == 2
    assert "not reached" not in README
    assert "target |" not in README


def test_getting_started_lists_every_folder_of_the_package():
    text = (ROOT / "notebooks" / "guide" / "getting-started.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "specsim").glob("*/__init__.py")} - {"reference", "fast"}
    assert {folder for folder in folders if f"| `{folder}/` |" not in text} == set()
    operations = re.findall(r"`((?:reference|fast|tests)/[\w/.]+)`", text)
    assert [path for path in operations if not (ROOT / path).exists()] == []


def test_the_fault_page_counts_the_catalogue():
    from specsim.correctness.faults.catalogue import FAULTS

    text = (ROOT / "notebooks" / "guide" / "fault-catalogue.md").read_text(encoding="utf-8")
    assert f"holds {len(FAULTS)} defects" in text


def test_links_of_the_front_page_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []
