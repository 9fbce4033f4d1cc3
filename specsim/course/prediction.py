"""Predictions: a number that the reader guesses before a measurement, and its score afterwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from specsim.core.arguments import check_arguments
from specsim.core.errors import require, require_number
from specsim.core.limits import NonNegativeNumber, Probability

_SESSION: dict[str, "Score"] = {}  # of this process, by question; a cell that runs again replaces its own
_FINITE = 1e300


@dataclass(frozen=True, slots=True)
class Score:
    """A prediction next to the result."""

    question: str
    guess: float
    actual: float
    allowed: float  # largest difference that counts as close

    @property
    def difference(self) -> float:
        """Distance between guess and result."""
        return abs(self.guess - self.actual)

    @property
    def is_close(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.allowed * (1 + 1e-9)

    def __repr__(self) -> str:
        tolerance = f"within the tolerance of {self.allowed:.3g}"
        verdict = tolerance if self.is_close else f"not {tolerance}"
        return f"You said {self.guess:.4g}, it is {self.actual:.4g}: off by {self.difference:.3g}, {verdict}."


@dataclass(frozen=True, slots=True)
class Prediction:
    """A guess that waits for its result."""

    question: str
    guess: float
    within: float  # tolerance, as a share of the result
    at_least: float  # tolerance where that share is smaller

    def score(self, actual: float) -> Score:
        """Compare the guess with the result, and note the score for `scores`."""
        require_number("actual", actual := float(actual), -_FINITE, _FINITE, "a number")
        score = Score(self.question, self.guess, actual, max(self.within * abs(actual), self.at_least))
        _SESSION[self.question] = score
        return score

    def __repr__(self) -> str:
        return f"{self.question} Your guess: {self.guess:.4g}."


@dataclass(frozen=True, slots=True)
class SessionScores:
    """All scores of a session, in the order of their questions."""

    rows: tuple[Score, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Score]:
        return iter(self.rows)

    @property
    def _summary(self) -> str:
        close = sum(score.is_close for score in self.rows)
        return f"{close} of {len(self.rows)} predictions within their tolerance"

    def __repr__(self) -> str:
        return "\n".join([f"{self._summary}", *(f"  {score.question} {score}" for score in self.rows)])

    def _repr_html_(self) -> str:
        cells = ((score.question, f"{score.guess:.4g}", f"{score.actual:.4g}", "yes" if score.is_close else "no")
                 for score in self.rows)  # fmt: skip
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
        head = "<tr><th>question</th><th>your guess</th><th>result</th><th>close</th></tr>"
        return f"<table><caption style='text-align:left'>{self._summary}</caption>{head}{body}</table>"


@check_arguments
def predict(question: str, guess: float, within: Probability = 0.1, at_least: NonNegativeNumber = 0.0) -> Prediction:
    """Note a guess before the result is known.

    within: the share of the result by which a close guess may differ. at_least: the difference that is always close.
    InputError for a guess that is no number.
    """
    require(question.strip(), "question", question, "a text")
    return Prediction(question, float(guess), within, at_least)


def scores() -> SessionScores:
    """List the scores of this session."""
    return SessionScores(tuple(_SESSION.values()))
