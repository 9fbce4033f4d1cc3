"""pytest's options for `pytest --pyargs specsim.conformance --impl my_kernels`; light: every run of pytest loads it."""


def pytest_addoption(parser) -> None:
    """Register --impl, --impl-ops and --impl-device."""
    group = parser.getgroup("specsim", "specsim.conformance")
    group.addoption("--impl", metavar="MODULE", help="module whose functions are run against the cases")
    group.addoption("--impl-ops", metavar="A,B", help="only these operations (default: all that the module has)")
    group.addoption("--impl-device", metavar="cpu|cuda", help="where they run (default: a GPU if there is one)")
