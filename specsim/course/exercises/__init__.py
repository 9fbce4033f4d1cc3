"""Exercises by their names; module notebook_03 holds those of notebook 03, and the notebook their statements."""

from importlib import import_module
from pkgutil import iter_modules

from specsim.course.exercise import Exercise


def exercises() -> dict[str, Exercise]:
    """Load all exercises, by their names in the order of the course."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    values = [value for module in modules for value in vars(module).values()]
    return {value.name: value for value in values if isinstance(value, Exercise)}
