"""GPUs: peak rates, bandwidth, memory and links, each figure with its source in hardware.csv, or from a user's file."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from specsim.core.arguments import check_arguments
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


@check_arguments
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


@check_arguments
def hardware(name: str) -> Hardware:
    """Find a GPU by its name in hardware.csv, or by the beginning of one (`H100`); case does not matter.

    A name that ends in .csv or .json is a file of one GPU, or after `#` the name of one of its GPUs (read_hardware).
    InputError for any other name; an ambiguous beginning lists its GPUs.
    """
    gpus = _shipped()
    if not isinstance(name, str):
        raise InputError("hardware", name, ", ".join(names()))
    path, _, chosen = name.partition("#")
    if path.lower().endswith(FILES):
        return _chosen(read_hardware(path), chosen, name)
    words = name.lower().split("-")
    matches = [gpus[name.lower()]] if name.lower() in gpus else _beginning_with(words)
    if len(matches) != 1:
        raise InputError("hardware", name, " or ".join(gpu.name for gpu in matches) or ", ".join(names()))
    return matches[0]


def _beginning_with(words: list[str]) -> list[Hardware]:
    return [gpu for name, gpu in _shipped().items() if name.split("-")[: len(words)] == words]


def names() -> tuple[str, ...]:
    """List the GPUs in hardware.csv."""
    return tuple(gpu.name for gpu in _shipped().values())


def reported_hardware(reported: str) -> Hardware | None:
    """Find the GPU that a driver names, such as NVIDIA H100 80GB HBM3; None for an unknown one."""
    words = set(reported.replace("-", " ").lower().split())
    if words & {"pcie", "nvl"}:  # cards with other figures
        return None
    words_by_name = {name: set(name.lower().split("-")) - {"sxm"} for name in names()}
    return next((hardware(name) for name, required in words_by_name.items() if required <= words), None)


def read_hardware(path: Path | str) -> dict[str, Hardware]:
    """Read GPUs by name from a CSV as hardware.csv, or from JSON.

    JSON has an object for each GPU, in a list if there are several. An object has the fields of Hardware, with
    operations/s by dtype in peak_flops. InputError names file and line.
    """
    path = Path(path)
    text = read_text(path, "hardware", "a UTF-8 file that can be read")
    descriptions = _table(text, str(path)) if path.suffix.lower() == ".csv" else _objects(text, str(path))
    require(descriptions, "hardware", str(path), "a file of at least one GPU")
    gpus = {}
    for name, (location, figures) in descriptions.items():
        rates = {figure.removeprefix(_FLOPS) for figure in figures if figure.startswith(_FLOPS)}
        missing = [figure for figure in _FIGURES if figure not in figures]
        require(not missing, "hardware", location, f"a GPU with {', '.join(missing)}")
        unknown = sorted(set(figures) - {*_FIGURES, *(_FLOPS + dtype for dtype in DTYPES)})
        allowed = f"a GPU of {', '.join(_FIGURES)} and rates of {', '.join(DTYPES)}, not {', '.join(unknown)}"
        require(not unknown, "hardware", location, allowed)
        require(rates & {"bfloat16", "float16"}, "hardware", location, "a GPU with a rate for bfloat16 or float16")
        gpus[name] = _hardware(name, figures)
    return gpus


def _chosen(gpus: Mapping[str, Hardware], name: str, source: str) -> Hardware:
    if not name and len(gpus) == 1:
        return next(iter(gpus.values()))
    allowed = " or ".join(f"{source.partition('#')[0]}#{gpu}" for gpu in gpus)
    require(name in gpus, "hardware", source, allowed)
    return gpus[name]


_Descriptions = dict[str, tuple[str, dict[str, float]]]  # place and figures by name of the GPU


def _table(text: str, path: str) -> _Descriptions:
    table = read_table(text, "hardware", path)
    lacking = {"name", "figure", "value"} - set(table.columns)
    require(
        not lacking,
        "hardware",
        path,
        f"a CSV with columns name, figure and value, not without {min(lacking, default='')}",
    )
    descriptions: _Descriptions = {}
    for row in table.rows:
        figures = descriptions.setdefault(row.fields["name"], (row.location, {}))[1]
        figure = row.fields["figure"]
        require(figure not in figures, "hardware", row.location, f"one {figure} for each GPU")
        figures[figure] = row.number("value", LEAST)
    return descriptions


def _objects(text: str, path: str) -> _Descriptions:
    value = parse_json(text, "hardware", path, "a GPU as a JSON object, or a list of them")
    descriptions: _Descriptions = {}
    for index, gpu in enumerate(value if isinstance(value, list) else [value], start=1):
        location = f"{path}, GPU {index}"
        if not isinstance(gpu, Mapping) or not isinstance(gpu.get("name"), str):
            raise InputError("hardware", location, "a JSON object with a name")
        rates = gpu.get("peak_flops")
        require(
            isinstance(rates, Mapping) and rates,
            "hardware",
            location,
            "an object with operations/s by dtype in peak_flops",
        )
        figures = {_FLOPS + dtype: rate for dtype, rate in dict(rates or {}).items()}
        figures |= {figure: gpu[figure] for figure in gpu if figure not in ("name", "peak_flops", "source")}
        require(gpu["name"] not in descriptions, "hardware", location, f"one GPU of the name {gpu['name']}")
        descriptions[gpu["name"]] = (
            location,
            {figure: read_number(value, figure, location, LEAST) for figure, value in figures.items()},
        )
    return descriptions


@cache
def _shipped() -> dict[str, Hardware]:
    figures: dict[str, dict[str, float]] = {}
    with _TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            figures.setdefault(row["name"], {})[row["figure"]] = float(row["value"])
    return {name.lower(): _hardware(name, values) for name, values in figures.items()}


def _hardware(name: str, figures: Mapping[str, float]) -> Hardware:
    rates = {figure.removeprefix(_FLOPS): value for figure, value in figures.items() if figure.startswith(_FLOPS)}
    return Hardware(
        name, rates, **{figure: value for figure, value in figures.items() if not figure.startswith(_FLOPS)}
    )
