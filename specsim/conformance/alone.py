"""One case in a process of its own: python -m specsim.conformance.alone MODULE OPERATION CASE DEVICE FILE."""

import sys
from pathlib import Path

import torch

from specsim.conformance.catalogue import case_of
from specsim.conformance.runner import call, function_of, load_module, write
from specsim.contract import BY_NAME

if __name__ == "__main__":
    module, operation, name, device, file = sys.argv[1:]
    function = function_of(load_module(module), BY_NAME[operation], device)
    write(call(function, case_of(operation, name), torch.device(device)), Path(file))
