"""Exercises in the sources of notebooks: question and starter are written from `specsim.course`.

python -m specsim.maintain.starters [FILE ...] writes them, in all notebooks of a checkout unless some are given. A
source has a cell with the heading `### Exercise 03-2` and, further down, one that calls
`specsim.course.check("03-2", ...)`; all that stands between the heading and the check is replaced.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from specsim.course import exercise, starter
from specsim.maintain.page import ROOT, rewrite

NOTEBOOKS = ROOT / "notebooks"
BLOCK = re.compile(
    r'^# %% \[markdown\]\n# ### Exercise (\d\d-\d+)\n.*?^# %%\nspecsim\.course\.check\("\1", \w+\)\n',
    re.DOTALL | re.MULTILINE,
)
_WIDTH = 120


def with_starters(source: str) -> str:
    """Write the question, starter and check of every exercise of a notebook's source."""
    return BLOCK.sub(lambda block: cells(block[1]), source)


def cells(name: str) -> str:
    """Write the three cells of an exercise."""
    chosen = exercise(name)
    paragraphs = [
        fill(text, _WIDTH, initial_indent="# ", subsequent_indent="# ") for text in _paragraphs(chosen.question)
    ]
    question = "\n#\n".join(["# %% [markdown]", f"# ### Exercise {name}", *paragraphs]).replace("\n#\n", "\n", 1)
    check = f'# %%\nspecsim.course.check("{name}", {chosen.solution.__name__})\n'
    return f"{question}\n\n\n# %%\n{starter(chosen)}\n\n{check}"


def _paragraphs(question: str) -> list[str]:
    return [" ".join(text.split()) for text in question.split("\n\n")]


def sources() -> list[Path]:
    """List the sources of all notebooks of a checkout."""
    return sorted(NOTEBOOKS.glob("[0-9]*.py"))


def main(arguments: Sequence[str]) -> None:
    """Write the exercises of these sources, or of all."""
    rewrite(map(Path, arguments) if arguments else sources(), with_starters)


if __name__ == "__main__":
    main(sys.argv[1:])
