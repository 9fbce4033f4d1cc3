"""Checks: each takes a setting and returns its findings, one per wrong field, the first cause first."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from specsim.core.errors import require_choice
from specsim.correctness.faults.fault import FaultFinding

_OTHERS = {"oracle": ("cells", "compare_oracle"), "ranks": ("cells", "compare_ranks")}
CHECKS = {name: (name, "check") for name in ("differential", "batched", "distribution", "trees", "memory")} | _OTHERS
INTERPRETED = ("memory", "ranks")  # checks that need Triton's interpreter, even with a GPU


def run_check(name: str, setting: Mapping[str, Any], device: str) -> list[FaultFinding]:
    """Run the check of that name."""
    require_choice("check", name, CHECKS)
    module, function = CHECKS[name]
    return getattr(import_module(f"{__name__}.{module}"), function)(dict(setting), device)
