"""GPUs: peak rates, bandwidth, memory and links, each figure with its source in hardware.csv, or from a user's file."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from specsim.core.errors import InputError, require
from specsim.core.files import parse_json, read_text
from specsim.core.limits import read_number
from specsim.core.table import read_table
from specsim.simulator.bounds import number

_TABLE = Path(__file__).parent / "hardware.csv"
_FLOPS = "peak_flops_"
_FIGURES = ("bandwidth", "memory", "interconnect")
DTYPES = ("bfloat16", "float16", "float8", "float4", "int8")
FILES = (".csv", ".json")
LEAST = 1.0  # operation/s, byte/s or byte


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
            number(f"peak_flops {dtype}", rate, LEAST)
        for name in _FIGURES:
            number(name, getattr(self, name), LEAST)

    def flops(self, dtype: str) -> float:
        """Look up the peak rate of a dtype; InputError for a dtype without a figure."""
        if dtype not in self.peak_flops:
            raise InputError("dtype", dtype, f"{' or '.join(self.peak_flops)} on {self.name}")
        return self.peak_flops[dtype]


def hardware(name: str) -> Hardware:
    """Find a GPU by its name in hardware.csv, or by the beginning of one (`H100`); case does not matter.

    A name that ends in .csv or .json is a file of one GPU, or after `#` the name of one of its GPUs (read_hardware).
    InputError for any other name; an ambiguous beginning lists its GPUs.
    """
    known = _known()
    if not isinstance(name, str):
        raise InputError("hardware", name, ", ".join(names()))
    path, _, chosen = name.partition("#")
    if path.lower().endswith(FILES):
        return _chosen(read_hardware(path), chosen, name)
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


def read_hardware(path: Path | str) -> dict[str, Hardware]:
    """Read GPUs by name from a CSV as hardware.csv, or from JSON.

    JSON has an object for each GPU, in a list if there are several. An object has the fields of Hardware, with
    operations/s by dtype in peak_flops. InputError names file and line.
    """
    path = Path(path)
    text = read_text(path, "hardware", "a UTF-8 file that can be read")
    found = _table(text, str(path)) if path.suffix.lower() == ".csv" else _objects(text, str(path))
    require(found, "hardware", str(path), "a file of at least one GPU")
    gpus = {}
    for name, (place, figures) in found.items():
        rates = {each.removeprefix(_FLOPS) for each in figures if each.startswith(_FLOPS)}
        missing = [each for each in _FIGURES if each not in figures]
        require(not missing, "hardware", place, f"a GPU with {', '.join(missing)}")
        unknown = sorted(set(figures) - {*_FIGURES, *(_FLOPS + dtype for dtype in DTYPES)})
        allowed = f"a GPU of {', '.join(_FIGURES)} and rates of {', '.join(DTYPES)}, not {', '.join(unknown)}"
        require(not unknown, "hardware", place, allowed)
        require(rates & {"bfloat16", "float16"}, "hardware", place, "a GPU with a rate for bfloat16 or float16")
        gpus[name] = _hardware(name, figures)
    return gpus


def _chosen(gpus: Mapping[str, Hardware], name: str, source: str) -> Hardware:
    if not name and len(gpus) == 1:
        return next(iter(gpus.values()))
    allowed = " or ".join(f"{source.partition('#')[0]}#{each}" for each in gpus)
    require(name in gpus, "hardware", source, allowed)
    return gpus[name]


_Found = dict[str, tuple[str, dict[str, float]]]  # place and figures by name of the GPU


def _table(text: str, path: str) -> _Found:
    table = read_table(text, "hardware", path)
    lacking = {"name", "figure", "value"} - set(table.columns)
    require(
        not lacking,
        "hardware",
        path,
        f"a CSV with columns name, figure and value, not without {min(lacking, default='')}",
    )
    found: _Found = {}
    for row in table.rows:
        figures = found.setdefault(row.fields["name"], (row.location, {}))[1]
        figure = row.fields["figure"]
        require(figure not in figures, "hardware", row.location, f"one {figure} for each GPU")
        figures[figure] = row.number("value", LEAST)
    return found


def _objects(text: str, path: str) -> _Found:
    value = parse_json(text, "hardware", path, "a GPU as a JSON object, or a list of them")
    found: _Found = {}
    for index, gpu in enumerate(value if isinstance(value, list) else [value], start=1):
        place = f"{path}, GPU {index}"
        if not isinstance(gpu, Mapping) or not isinstance(gpu.get("name"), str):
            raise InputError("hardware", place, "a JSON object with a name")
        rates = gpu.get("peak_flops")
        require(
            isinstance(rates, Mapping) and rates,
            "hardware",
            place,
            "an object with operations/s by dtype in peak_flops",
        )
        figures = {_FLOPS + dtype: rate for dtype, rate in dict(rates or {}).items()}
        figures |= {each: gpu[each] for each in gpu if each not in ("name", "peak_flops", "source")}
        require(gpu["name"] not in found, "hardware", place, f"one GPU of the name {gpu['name']}")
        found[gpu["name"]] = (place, {each: read_number(value, each, place, LEAST) for each, value in figures.items()})
    return found


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
