"""Conformance cases as tests: pytest --pyargs specsim.correctness.conformance --impl my_kernels."""

from collections.abc import Iterator

import pytest

from specsim.core.engine_options import check_device
from specsim.core.errors import InputError
from specsim.core.user_module import load_module
from specsim.correctness.conformance.runner import CaseProcess, KernelCase, chosen_cases, chosen_operations


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for every case of every operation that the module has; UsageError for bad options."""
    module = metafunc.config.getoption("--impl")
    names = metafunc.config.getoption("--impl-ops")
    try:
        if module is None:
            raise InputError("--impl", None, "the module whose functions are run against the cases")
        chosen = chosen_operations(load_module(module), names and names.split(","))
        check_device(metafunc.config.getoption("--impl-device"))
    except InputError as error:
        raise pytest.UsageError(str(error)) from error
    cases = chosen_cases(chosen)
    metafunc.parametrize("case", cases, ids=[case.id for case in cases])


@pytest.fixture(scope="session")
def process(pytestconfig: pytest.Config) -> Iterator[CaseProcess]:
    """Start the process that all cases share."""
    device = check_device(pytestconfig.getoption("--impl-device"))
    with CaseProcess(str(pytestconfig.getoption("--impl")), device) as started:
        yield started


def test_case(case: KernelCase, process: CaseProcess) -> None:
    """Run one case; the message names operation, case and first wrong element."""
    outcome = process.run(case)
    if not outcome.passed:
        pytest.fail(f"{case.id}: {outcome.status}: {outcome.detail}", pytrace=False)
