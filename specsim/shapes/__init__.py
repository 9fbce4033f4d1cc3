"""Shapes of published models, and pairs of such a shape whose weights are random: for timing, never for text."""

from specsim.shapes.model_shape import NAMES, Shape, shape
from specsim.shapes.prompt import random_prompt
from specsim.shapes.weights import random_pair

__all__ = ["NAMES", "Shape", "random_pair", "random_prompt", "shape"]
