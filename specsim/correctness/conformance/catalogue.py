"""All cases in the order of the operations."""

from specsim.correctness.conformance import attention, chains, drafting, extension, greedy, slots, target_only, trees
from specsim.correctness.conformance.case import KernelCase
from specsim.correctness.conformance.contract import OPERATIONS

CASES: tuple[KernelCase, ...] = tuple(
    case
    for operation in OPERATIONS
    for module in (drafting, trees, greedy, target_only, slots, extension, attention, chains)
    for case in module.CASES
    if case.operation == operation.name
)
