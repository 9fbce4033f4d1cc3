"""Pages of the course: a table of the notebooks, and their goals, exercises and usual mistakes for teachers."""

import re
from dataclasses import dataclass
from pathlib import Path

from specsim.course import exercise, names
from specsim.maintain.page import markdown

_FIELD = re.compile(r"^\* \*\*(Goal|Before|Time):\*\* (.*?)(?=^\*|\n\n|\Z)", re.DOTALL | re.MULTILINE)
_PREDICTION = re.compile(r"specsim\.course\.predict\(\s*(['\"])(.*?)\1", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Head:
    """The top of a notebook."""

    title: str
    goal: str  # abilities of a reader who has worked through it
    before: str  # prerequisites
    time: str  # minutes to work through, seconds to run

    @property
    def minutes(self) -> int:
        """Count the minutes that a reader needs."""
        return int(re.findall(r"(\d+) minutes", self.time)[0])


def notebook_head(source: str) -> Head:
    """Read the title and the list of goal, prerequisites and time from the first cell of a notebook's source.

    ValueError where one of them is missing.
    """
    text = source.partition("# %% [markdown]\n")[2].partition("\n# %%")[0]
    text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
    title = re.match(r"# (.*)", text)
    fields = {name: " ".join(words.split()) for name, words in _FIELD.findall(text)}
    if title is None or fields.keys() != {"Goal", "Before", "Time"} or "minutes" not in fields["Time"]:
        raise ValueError(f"the first cell of a notebook has a title, Goal, Before and Time, not {text[:60]!r}")
    return Head(title[1], fields["Goal"], fields["Before"], fields["Time"])


def course_pages(root: Path) -> dict[str, str]:
    """Write the table of all notebooks, and what teachers need to know of each, by path."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted((root / "notebooks").glob("[0-9]*.py"))}
    heads = {stem: notebook_head(source) for stem, source in sources.items()}
    rows = [
        (stem[:2], f"[{head.title}](notebooks/{stem}.ipynb)", head.goal, str(head.minutes))
        for stem, head in heads.items()
    ]
    total = sum(head.minutes for head in heads.values())
    overview = [*markdown(("", "notebook", "afterwards", "minutes"), rows), "", f"Together: {total} minutes."]
    notes = [line for stem, head in heads.items() for line in _notes(stem, head, sources[stem])]
    return {"generated/course.md": "\n".join(overview) + "\n", "generated/teaching.md": "\n".join(notes) + "\n"}


def statement(source: str, name: str) -> str:
    """Read the first paragraph of an exercise from a notebook's source."""
    paragraph = source.partition(f"# ### Exercise {name}\n#\n")[2].partition("\n#\n")[0].partition("\n\n")[0]
    return " ".join(re.sub(r"^# ?", "", paragraph, flags=re.MULTILINE).split())


def _notes(stem: str, head: Head, source: str) -> list[str]:
    """Write a section of the page for teachers."""
    lines = [f"## {int(stem[:2])}. {head.title}", ""]
    lines += [f"- **Goal:** {head.goal}", f"- **Before:** {head.before}", f"- **Time:** {head.time}", ""]
    questions = [" ".join(question.split()) for _, question in _PREDICTION.findall(source)]
    if questions:
        lines += ["Predictions:", "", *(f"- {question}" for question in questions), ""]
    for name in (name for name in names() if name.startswith(stem[:2])):
        solved = exercise(name)
        lines += [f"**Exercise {name}**, `{solved.solution.__name__}`. {statement(source, name)}", ""]
        lines += ["What goes wrong:", "", *(f"- {mistake.reason}" for mistake in solved.mistakes), ""]
        lines += [f"Why the solution is right: {solved.explanation}", ""]
    return lines
