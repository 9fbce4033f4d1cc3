"""Exercises of notebooks are those of specsim.course, each in one notebook, as the command writes them."""

import re

import pytest

from specsim.course import exercise, names, starter
from specsim.maintain.starters import cells, sources, with_starters

CHECK = re.compile(r'^specsim\.course\.check\("([^"]*)"', re.MULTILINE)


@pytest.mark.parametrize("source", sources(), ids=lambda path: path.stem)
def test_notebook_has_the_exercises_as_written(source):
    """Else: python -m specsim.maintain.starters."""
    text = source.read_text(encoding="utf-8")
    assert with_starters(text) == text
    for name in CHECK.findall(text):
        assert cells(name) in text


def test_every_exercise_is_in_the_notebook_of_its_number():
    found = {source.stem[:2]: CHECK.findall(source.read_text(encoding="utf-8")) for source in sources()}
    assert [name for number in sorted(found) for name in found[number]] == names()
    assert all(name.startswith(number) for number, own in found.items() for name in own)


SOURCE = """# %% [markdown]
# Text.

# %% [markdown]
# ### Exercise 03-1

# %%
specsim.course.check("03-1", old)

# %%
1
"""


def test_a_heading_and_a_check_become_three_cells():
    written = with_starters(SOURCE)
    assert written == SOURCE.replace(
        SOURCE[SOURCE.index("# %% [markdown]\n# ###") : SOURCE.index("\n# %%\n1")], cells("03-1")
    )
    assert starter(exercise("03-1")) in written
    assert with_starters(written) == written
    changed = written.replace('raise NotImplementedError("your answer")', "return 0")
    assert with_starters(changed) == written


def test_other_text_is_left_alone():
    assert with_starters("# %% [markdown]\n# ### Exercise 03-1\n") == "# %% [markdown]\n# ### Exercise 03-1\n"
