"""Provenance of a result: versions, code and time."""

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from specsim.core.code_digest import code_digests

PACKAGES = ("specsim", "torch", "triton")


def versions(device: str) -> dict[str, Any]:
    """Collect the versions of Python and the computing packages, on `cuda` also GPU and code digests."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "code": code_digests()}
    return found


def now() -> str:
    """Return date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
