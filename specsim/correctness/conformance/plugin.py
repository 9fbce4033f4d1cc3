"""Options of pytest for `pytest --pyargs specsim.correctness.conformance --impl my_kernels`.

Every run of pytest loads this file, so it imports nothing else.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: "pytest.Parser") -> None:
    """Register --impl, --impl-ops and --impl-device."""
    group = parser.getgroup("specsim", "specsim.correctness.conformance")
    group.addoption("--impl", metavar="MODULE", help="module whose functions are run against the cases")
    group.addoption("--impl-ops", metavar="A,B", help="only these operations (default: all that the module has)")
    group.addoption("--impl-device", metavar="cpu|cuda", help="device of the cases (default: a GPU if there is one)")
