"""Checks: each takes a setting and returns its findings, one per wrong field, the first cause first."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from specsim.core.errors import require_choice
from specsim.correctness.faults.fault import FaultFinding

CHECKS = ("differential", "oracle", "batched", "distribution", "trees", "memory", "ranks")

INTERPRETED = ("memory", "ranks")  # checks that need Triton's interpreter, even with a GPU


def run_check(name: str, setting: Mapping[str, Any], device: str) -> list[FaultFinding]:
    """Run the check of that name."""
    require_choice("check", name, CHECKS)
    run: Callable[..., list[FaultFinding]] = import_module(f"specsim.correctness.faults.checks.{name}").check
    return run(dict(setting), device)
