"""Source of an exercise's solution, and the starter made of it: the same lines without those that solve it."""

import re
from dataclasses import dataclass
from html import escape
from inspect import getsource

from specsim.course.exercise import Exercise
from specsim.course.exercises import exercise

# Lines between the marks are the answer; everything else is given.
_MARKED = re.compile(r"^( *)# begin answer\n.*?^ *# end answer\n", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"^ *# (begin|end) answer\n", re.MULTILINE)
PLACEHOLDER = 'raise NotImplementedError("your answer")'


@dataclass(frozen=True, slots=True, repr=False)
class Solution:
    """A solution, shown as source with its explanation."""

    exercise: str
    source: str
    explanation: str

    def __repr__(self) -> str:
        return f"{self.source}\n{self.explanation}"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.source)}</pre><p>{escape(self.explanation)}</p>"


def solution(name: str) -> Solution:
    """Show the solution of an exercise; InputError for the name of no exercise."""
    chosen = exercise(name)
    return Solution(name, _MARK.sub("", getsource(chosen.solution)), chosen.explanation)


def starter(chosen: Exercise) -> str:
    """Make the source that a notebook starts with: the solution, its marked lines replaced by a line that raises.

    ValueError for a solution without marked lines.
    """
    text, count = _MARKED.subn(rf"\1{PLACEHOLDER}\n", getsource(chosen.solution))
    if not count:
        raise ValueError(f"the solution of {chosen.name} has no lines between '# begin answer' and '# end answer'")
    return text
