"""Tests with real engines, which `make engines` installs; without ENGINES they are not collected."""

import os
from pathlib import Path

import pytest

PYTHON = os.environ.get("ENGINES")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Interpreter of the environment that has vLLM and speculators."""
    return Path(PYTHON).absolute()
