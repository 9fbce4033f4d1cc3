"""Reproducible tables, by name."""

from collections.abc import Callable

from specsim.core.errors import require
from specsim.simulator.reproduce import fast_rounds, leviathan, sglang_6995, spec_bench, vllm_20780, vllm_41162
from specsim.simulator.reproduce.reproduction import Reproduction

TABLES: dict[str, Callable[[], Reproduction]] = {
    "fast_rounds": fast_rounds.reproduce,
    "leviathan_table1": leviathan.table1,
    "leviathan_table4": leviathan.table4,
    "sglang_6995": sglang_6995.reproduce,
    "spec_bench": spec_bench.reproduce,
    "vllm_20780": vllm_20780.reproduce,
    "vllm_41162": vllm_41162.reproduce,
}


def reproduction(name: str) -> Callable[[], Reproduction]:
    """Return the function that reproduces the table of this name."""
    require(name in TABLES, "table", name, ", ".join(TABLES))
    return TABLES[name]
