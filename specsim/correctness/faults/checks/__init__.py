"""Judges: what each is given is a setting, and what it gives is every field that is wrong, the first cause first."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from specsim.core.errors import InputError
from specsim.correctness.faults.fault import Finding

CHECKS = ("differential", "oracle", "batched", "distribution", "trees", "memory")

INTERPRETED = ("memory",)  # which watch Triton's interpreter, also where there is a GPU


def judge(name: str, setting: Mapping[str, Any], device: str) -> list[Finding]:
    """The findings of a judge by its name."""
    if name not in CHECKS:
        raise InputError("judge", name, " or ".join(CHECKS))
    run: Callable[..., list[Finding]] = import_module(f"specsim.correctness.faults.checks.{name}").judge
    return run(dict(setting), device)
