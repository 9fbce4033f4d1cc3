"""Shapes of published models, and pairs of these shapes with random weights, for timing only."""

from specsim.models.shapes.model_shape import NAMES, Shape, shape
from specsim.models.shapes.prompt import random_prompts
from specsim.models.shapes.weights import random_pair

__all__ = ["NAMES", "Shape", "random_pair", "random_prompts", "shape"]
