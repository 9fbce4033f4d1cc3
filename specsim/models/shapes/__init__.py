"""Shapes of published models, and pairs of such a shape whose weights are random: for timing, never for text."""

from specsim.models.shapes.model_shape import NAMES, Shape, shape
from specsim.models.shapes.prompt import random_prompts
from specsim.models.shapes.weights import random_pair

__all__ = ["NAMES", "Shape", "random_pair", "random_prompts", "shape"]
