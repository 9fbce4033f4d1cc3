"""The course's machinery: exercises with checks and hidden solutions, and predictions that are scored."""

from specsim.course.check import CheckResult, Solution, check, exercise, names, solution
from specsim.course.exercise import Exercise, Mistake, starter
from specsim.course.prediction import Prediction, Score, SessionScores, predict, scores

__all__ = ["CheckResult", "Exercise", "Mistake", "Prediction", "Score", "SessionScores", "Solution"]
__all__ += ["check", "exercise", "names", "predict", "scores", "solution", "starter"]
