"""An exercise of the course: a question, a function that solves it, inputs that tell answers apart, usual mistakes."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Answer = Callable[..., Any]


def call(answer: Answer, *case: Any) -> Any:
    """Call an answer with an input of its exercise."""
    return answer(*case)


@dataclass(frozen=True, slots=True)
class Mistake:
    """A plausible wrong answer, with the sentence that its author should read."""

    answer: Answer
    reason: str


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question of a notebook, answered by a function.

    The answer is right if what `observe` sees of it is the same as of the solution, for every case.
    """

    name: str  # number of the notebook and of the exercise, such as 03-2
    question: str  # paragraphs of Markdown, which the notebook shows
    solution: Answer  # the lines between its marks are left out of the starter
    cases: tuple[tuple[Any, ...], ...]  # arguments of each call
    mistakes: tuple[Mistake, ...]  # at least two
    explanation: str  # reason for which the solution is right
    observe: Callable[..., Any] = call  # makes a value of an answer and a case, or a dictionary of named values

    def observed(self, answer: Answer) -> list[Any]:
        """Observe an answer on a copy of every case; an exception takes the place of a value.

        NotImplementedError, which a starter raises, goes through.
        """
        found: list[Any] = []
        for case in self.cases:
            try:
                found.append(self.observe(answer, *deepcopy(case)))
            except (NotImplementedError, KeyboardInterrupt):
                raise
            except BaseException as error:
                found.append(error)
        return found
