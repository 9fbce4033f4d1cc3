"""An exercise of a notebook: a solution with a comment, inputs that tell answers apart, and usual wrong answers.

The comment above a solution gives the reason for it and lists wrong answers. The code of a wrong answer is a change of
the solution, as `old` → `new`, several of them, or the value that it returns. The statement is in the notebook.
"""

import ast
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from inspect import getcomments, getsource, signature
from typing import Any

from specsim.core.arguments import check_arguments

Answer = Callable[..., Any]
_PLACEHOLDER = '    raise NotImplementedError("your answer")\n'
_END = "    # end answer\n"  # what follows is in the starter, too
_WRONG_ANSWER = re.compile(r"((?:`[^`]+`(?:, | → )?)+): (.+)")
_CHANGE = re.compile(r"`([^`]+)` → `([^`]+)`")


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
    solution: Answer
    cases: tuple[tuple[Any, ...], ...]  # arguments of each call
    mistakes: tuple[Mistake, ...]  # at least two
    explanation: str  # reason for which the solution is right
    observe: Callable[..., Any] = call  # makes a value of an answer and a case, or a dictionary of named values

    def observed(self, answer: Answer) -> list[Any]:
        """Observe an answer on a copy of every case; an exception takes the place of a value.

        NotImplementedError, which a starter raises, goes through.
        """
        values: list[Any] = []
        for case in self.cases:
            try:
                values.append(self.observe(answer, *deepcopy(case)))
            except (NotImplementedError, KeyboardInterrupt):
                raise
            except BaseException as error:
                values.append(error)
        return values


def solves(name: str, *cases: tuple[Any, ...], observe: Callable[..., Any] = call) -> Callable[[Answer], Exercise]:
    """Make the exercise of this name from its solution and the comment above it."""

    def exercise_of(solution: Answer) -> Exercise:
        comment = re.sub(r"^# ?", "", getcomments(solution) or "", flags=re.MULTILINE)
        texts = [" ".join(text.split()) for text in re.split(r"^- ", comment, flags=re.MULTILINE)]
        mistakes = tuple(_mistake(solution, text) for text in texts[1:])
        return Exercise(name, solution, cases, mistakes, texts[0], observe)

    return exercise_of


def _mistake(solution: Answer, text: str) -> Mistake:
    """Make a wrong answer of its code and its sentence; ValueError for code that does not fit the solution."""
    match = _WRONG_ANSWER.fullmatch(text)
    if match is None:
        raise ValueError(f"a wrong answer to {solution.__name__} has no code with a sentence: {text}")
    code, sentence = match.groups()
    names = {**vars(sys.modules[solution.__module__]), solution.__name__: solution}
    changes = _CHANGE.findall(code)
    if not changes:
        parameters = ", ".join(signature(solution).parameters)
        return Mistake(eval(f"lambda {parameters}: ({code[1:-1]})", names), sentence)
    head, body = _head_and_body(solution)
    for old, new in changes:
        if old not in body:
            raise ValueError(f"the solution {solution.__name__} has no {old!r}")
        body = body.replace(old, new)
    exec(head + body, names)
    return Mistake(names[solution.__name__], sentence)


def _head_and_body(solution: Answer) -> tuple[str, str]:
    """Split the source of a solution behind its docstring."""
    lines = getsource(solution).splitlines(keepends=True)
    (function,) = ast.parse("".join(lines)).body
    assert isinstance(function, ast.FunctionDef)
    end = function.body[0].end_lineno
    return "".join(lines[function.lineno - 1 : end]), "".join(lines[end:])


def source(exercise: Exercise) -> str:
    """Read the source of the solution."""
    return "".join(_head_and_body(exercise.solution)).replace(_END, "")


@check_arguments
def starter(exercise: Exercise) -> str:
    """Make the source that a notebook starts with: the solution, with a line that raises in place of the answer."""
    head, body = _head_and_body(exercise.solution)
    return head + _PLACEHOLDER + body.partition(_END)[2]
