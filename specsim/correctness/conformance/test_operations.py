"""Conformance cases as tests: pytest --pyargs specsim.correctness.conformance --impl my_kernels."""

import pytest

from specsim.core.engine_options import check_device
from specsim.core.errors import InputError
from specsim.core.user_module import load_module
from specsim.correctness.conformance.runner import CASES, KernelCase, chosen_operations, run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for every case of every operation that the module has; UsageError for bad options."""
    module = metafunc.config.getoption("--impl")
    names = metafunc.config.getoption("--impl-ops")
    try:
        if module is None:
            raise InputError("--impl", None, "the module whose functions are run against the cases")
        chosen = chosen_operations(load_module(module), names and names.split(","))
        metafunc.parametrize("device", [check_device(metafunc.config.getoption("--impl-device"))])
    except InputError as error:
        raise pytest.UsageError(str(error)) from error
    operation_names = {operation.name for operation in chosen}
    cases = [case for case in CASES if case.operation in operation_names]
    metafunc.parametrize("case", cases, ids=[case.id for case in cases])


def test_case(case: KernelCase, device: str, pytestconfig: pytest.Config) -> None:
    """Run one case; the message names operation, case and first wrong element."""
    outcome = run(str(pytestconfig.getoption("--impl")), case, device)
    if not outcome.passed:
        pytest.fail(f"{case.id}: {outcome.status}: {outcome.detail}", pytrace=False)
