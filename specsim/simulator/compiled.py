"""The steps of a simulation, compiled by numba or interpreted, with equal results."""

import importlib.util
import os
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from specsim.core.errors import require_choice
from specsim.simulator import steps

SWITCH = "SPECSIM_COMPILED"  # 0: never compiled, 1: always; unset: where it pays
LEAST_TOKENS = 50_000  # output tokens that take longer interpreted than a compiled loop takes to load


def loop(tokens: int) -> ModuleType:
    """Return specsim.simulator.steps, or its compiled copy for a workload of many output tokens.

    Without numba it is never compiled.
    """
    switch = os.environ.get(SWITCH, "")
    require_choice(SWITCH, switch, ("", "0", "1"))
    if switch == "0" or (not switch and tokens < LEAST_TOKENS):
        return steps
    return compiled_steps() or steps


@cache
def compiled_steps() -> ModuleType | None:
    """Make the compiled copy, None without numba; machine code is kept on disk where a folder can be written."""
    try:
        from numba import njit
    except ImportError:
        return None
    spec = importlib.util.find_spec(steps.__name__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name, value in list(vars(copy).items()):
        if isinstance(value, FunctionType) and value.__module__ == steps.__name__:
            setattr(copy, name, _compile(njit, value))
    return copy


def _compile(njit: Any, function: FunctionType) -> Any:
    try:
        return njit(cache=True, forceinline=True)(function)
    except RuntimeError:  # no folder for the cache
        return njit(forceinline=True)(function)
