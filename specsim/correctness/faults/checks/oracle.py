"""Comparison of the reference with the oracle: it detects faults that both implementations share."""

from typing import Any

from specsim.correctness.faults.fault import Finding


def check(setting: dict[str, Any], _device: str) -> list[Finding]:
    """Compare tokens, finish reasons, counters and logprobs of every request; setting: see checks.cells."""
    from specsim.correctness.differential.oracle import compare_with_oracle
    from specsim.correctness.differential.pairs import make_pair
    from specsim.correctness.faults.checks.cells import cell

    case = cell(setting)
    found = compare_with_oracle(case, make_pair(case.pair))
    return [Finding(each.field, f"{each.phase}, request {each.request}", each.reference, each.fast) for each in found]
