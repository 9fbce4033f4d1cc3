"""Provenance of a result: versions, code and time."""

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from specsim.core.code_digest import code_digests

PACKAGES = ("specsim", "torch", "triton")


def versions(device: str, only_imported: bool = False) -> dict[str, Any]:
    """Collect the versions of Python and the computing packages, on `cuda` also GPU and code digests.

    only_imported: digests of modules that this process has imported, where no other process computes.
    """
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device == "cuda":
        code = {name: each for name, each in code_digests().items() if not only_imported or name in sys.modules}
        found |= {"gpu": torch.cuda.get_device_name(), "code": code}
    return found


def now() -> str:
    """Return date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
