"""Two engines, the same prompts, other tokens: is it rounding, or a fault?"""

from specsim.explain.answers import Answer, read_answers
from specsim.explain.finding import Finding, Noise, explain

__all__ = ["Answer", "Finding", "Noise", "explain", "read_answers"]
