"""Differences between two engines' answers to the same prompts: rounding or a fault."""

from specsim.correctness.explain.answers import Answer, read_answers
from specsim.correctness.explain.finding import AnswerComparison, Noise, explain

__all__ = ["Answer", "AnswerComparison", "Noise", "explain", "read_answers"]
