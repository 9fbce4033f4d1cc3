"""Provenance of a result: versions and time."""

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("specsim", "torch", "triton")


def versions(device: str) -> dict[str, str]:
    """List the versions of Python and of the packages that compute; on `cuda` the name of the GPU too."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})


def now() -> str:
    """Date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
