"""Run one case in its own process.

python -m specsim.correctness.conformance.one_case MODULE OPERATION CASE DEVICE FILE
"""

import sys
from pathlib import Path

import torch

from specsim.core.user_module import load_module
from specsim.correctness.conformance.catalogue import CASES
from specsim.correctness.conformance.contract import BY_NAME
from specsim.correctness.conformance.runner import call, function_of, write

if __name__ == "__main__":
    module, operation, name, device, file = sys.argv[1:]
    function = function_of(load_module(module), BY_NAME[operation], device)
    if function is None:
        raise LookupError(f"{module} has no function for {operation}")
    case = next(case for case in CASES if (case.operation, case.name) == (operation, name))
    write(call(function, case, torch.device(device)), Path(file))
