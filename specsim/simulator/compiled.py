"""The steps of a simulation, compiled by numba or interpreted, with equal results."""

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from specsim.core.errors import require_choice
from specsim.simulator import places, state, steps

MODULES = (places, steps)  # each after those whose functions it imports
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
        import numba  # noqa: F401
    except ImportError:
        return None
    return compiled_copy(MODULES, digest_of((*MODULES, state)))


def compiled_copy(modules: Sequence[ModuleType], digest: str) -> ModuleType:
    """Copy modules with compiled functions, which call each other, and return the copy of the last one.

    digest: of the sources. It is in the names of the compiled functions, since numba would else take a function from
    its cache though a function of another file that it calls has changed.
    """
    from numba import njit

    compiled_functions: dict[tuple[str, str], Any] = {}
    copies = [_copy(module) for module in modules]
    for copy in copies:
        for name, value in list(vars(copy).items()):
            if not isinstance(value, FunctionType):
                continue
            if value.__module__ == copy.__name__:
                value.__qualname__ += f"_{digest}"
                compiled_functions[copy.__name__, name] = _compile(njit, value)
            setattr(copy, name, compiled_functions.get((value.__module__, value.__name__), value))
    return copies[-1]


def _copy(module: ModuleType) -> ModuleType:
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def digest_of(modules: Sequence[ModuleType]) -> str:
    """Compute a digest of the sources of modules."""
    sources = [Path(module.__file__ or "").read_bytes() for module in modules]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:12]


def _compile(njit: Any, function: FunctionType) -> Any:
    try:
        return njit(cache=True, forceinline=True)(function)
    except RuntimeError:  # no folder for the cache
        return njit(forceinline=True)(function)
