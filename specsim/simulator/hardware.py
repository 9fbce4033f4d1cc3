"""GPUs: peak rates, bandwidth, memory and links, each figure with its source in hardware.csv."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from specsim.core.errors import InputError
from specsim.simulator.bounds import positive

_TABLE = Path(__file__).parent / "hardware.csv"
_FLOPS = "peak_flops_"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU."""

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)  # operations/s of dense matrix products by dtype (bfloat16, …)
    bandwidth: float  # bytes/s of its memory
    memory: float  # bytes (a data sheet's GB is taken as 2^30 bytes)
    interconnect: float  # bytes/s in one direction to the other GPUs of the server

    def __post_init__(self) -> None:
        if not self.peak_flops:
            raise InputError("peak_flops", dict(self.peak_flops), "a rate for at least one dtype")
        for dtype, rate in self.peak_flops.items():
            positive(f"peak_flops {dtype}", rate)
        for name in ("bandwidth", "memory", "interconnect"):
            positive(name, getattr(self, name))

    def flops(self, dtype: str) -> float:
        """Look up the peak rate of a dtype; InputError for a dtype without a figure."""
        if dtype not in self.peak_flops:
            raise InputError("dtype", dtype, f"{' or '.join(self.peak_flops)} on {self.name}")
        return self.peak_flops[dtype]


def hardware(name: str) -> Hardware:
    """Find a GPU by its name in hardware.csv, or by the beginning of one (`H100`); case does not matter.

    InputError for any other name; an ambiguous beginning lists its GPUs.
    """
    known = _known()
    if not isinstance(name, str):
        raise InputError("hardware", name, ", ".join(names()))
    words = name.lower().split("-")
    found = [known[name.lower()]] if name.lower() in known else _beginning_with(words)
    if len(found) != 1:
        raise InputError("hardware", name, " or ".join(gpu.name for gpu in found) or ", ".join(names()))
    return found[0]


def _beginning_with(words: list[str]) -> list[Hardware]:
    return [gpu for name, gpu in _known().items() if name.split("-")[: len(words)] == words]


def names() -> tuple[str, ...]:
    """List the GPUs in hardware.csv."""
    return tuple(gpu.name for gpu in _known().values())


@cache
def _known() -> dict[str, Hardware]:
    figures: dict[str, dict[str, float]] = {}
    with _TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            figures.setdefault(row["name"], {})[row["figure"]] = float(row["value"])
    return {name.lower(): _hardware(name, values) for name, values in figures.items()}


def _hardware(name: str, figures: Mapping[str, float]) -> Hardware:
    rates = {each.removeprefix(_FLOPS): value for each, value in figures.items() if each.startswith(_FLOPS)}
    return Hardware(name, rates, **{each: value for each, value in figures.items() if not each.startswith(_FLOPS)})
