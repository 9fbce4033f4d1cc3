"""Comparison of the reference with the oracle: it detects faults that both implementations share."""

from typing import Any

from specsim.correctness.faults.fault import FaultFinding


def check(setting: dict[str, Any], _device: str) -> list[FaultFinding]:
    """Compare tokens, finish reasons, counters and logprobs of every request; setting: see checks.cells."""
    from specsim.correctness.differential.oracle import compare_with_oracle
    from specsim.correctness.differential.pairs import make_pair
    from specsim.correctness.faults.checks.cells import cell

    case = cell(setting)
    divergences = compare_with_oracle(case, make_pair(case.pair))
    return [
        FaultFinding(
            divergence.field, f"{divergence.phase}, request {divergence.request}", divergence.reference, divergence.fast
        )
        for divergence in divergences
    ]
