"""The course's machinery: exercises with checks and hidden solutions, and predictions that are scored."""

from specsim.course.check import CheckResult, check
from specsim.course.exercise import Exercise, Mistake
from specsim.course.exercises import exercise, names
from specsim.course.prediction import Prediction, Score, Scores, predict, scores
from specsim.course.solution import Solution, solution, starter

__all__ = ["CheckResult", "Exercise", "Mistake", "Prediction", "Score", "Scores", "Solution"]
__all__ += ["check", "exercise", "names", "predict", "scores", "solution", "starter"]
