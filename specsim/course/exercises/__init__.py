"""Exercises by their names; module notebook_03 holds those of notebook 03, in the tuple EXERCISES."""

from importlib import import_module
from pkgutil import iter_modules

from specsim.core.errors import require
from specsim.course.exercise import Exercise


def names() -> list[str]:
    """List the names of all exercises, in the order of the course."""
    modules = sorted(module.name for module in iter_modules(__path__) if module.name.startswith("notebook_"))
    return [each.name for module in modules for each in import_module(f"{__name__}.{module}").EXERCISES]


def exercise(name: str) -> Exercise:
    """Find an exercise; InputError for a name that none has."""
    require(name in names(), "exercise", name, f"one of {', '.join(names())}")
    return next(each for each in import_module(f"{__name__}.notebook_{name[:2]}").EXERCISES if each.name == name)
