"""Pages of the course list every notebook with its head, and every mistake for teachers."""

from pathlib import Path

import pytest

from notebooks.guide.pages.course import Head, course_pages, notebook_head
from specsim.course import exercise, names

ROOT = Path(__file__).parents[2]
SOURCE = """# %% [markdown]
# # A title
#
# * **Goal:** You can read
#   two lines.
# * **Before:** Nothing.
# * **Time:** 20 minutes to work through, 3 seconds to run.
#
# Text.

# %%
1
"""


def test_head_is_read_from_the_first_cell():
    time = "20 minutes to work through, 3 seconds to run."
    head = notebook_head(SOURCE)
    assert head == Head("A title", "You can read two lines.", "Nothing.", time)
    assert head.minutes == 20


@pytest.mark.parametrize("line", ["# # A title\n", "# * **Before:** Nothing.\n", "20 minutes"])
def test_head_without_a_part_is_refused(line):
    with pytest.raises(ValueError, match="first cell"):
        notebook_head(SOURCE.replace(line, ""))


def test_pages_list_every_notebook_and_every_mistake():
    pages = course_pages(ROOT)
    for path in (ROOT / "notebooks").glob("[0-9]*.py"):
        assert f"(notebooks/{path.stem}.ipynb)" in pages["generated/course.md"]
    for name in names():
        assert f"**Exercise {name}**" in pages["generated/teaching.md"]
        assert all(each.reason in pages["generated/teaching.md"] for each in exercise(name).mistakes)
    assert "Of 1000 drafts, how many can the best rule keep?" in pages["generated/teaching.md"]
