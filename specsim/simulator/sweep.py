"""Sweep of many cells through an executor into one SQLite file, cell by cell: no written cell is lost."""

import json
import os
import socket
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError, require
from specsim.core.limits import read_number
from specsim.core.workers import finished
from specsim.simulator.calibration.profile import names as profile_names
from specsim.simulator.calibration.profile import profile
from specsim.simulator.candidates import EQUAL
from specsim.simulator.cell import Cell
from specsim.simulator.model import names, read_config
from specsim.simulator.request_formats import read_requests
from specsim.simulator.results import METRICS

FIELDS = tuple(field.name for field in fields(Cell))
LATER = {  # fields that the first sweeps did not have; their defaults leave keys and files as they were
    field.name: field.default
    for field in fields(Cell)
    if field.name
    in (
        "trace",
        "tokenizer",
        "characters_per_token",
        "prefix_cache",
        "burstiness",
        "swing",
        "period",
        "kv_cache_dtype",
        "kept",
        "profile",
        "adaptive",
        "adaptive_per_request",
    )
}
VERSION = 1  # of the SQLite file; it grows when a column changes its meaning
COLUMNS = ("key", *FIELDS, *METRICS, "error", "seconds", "worker")
JSON_FIELDS = ("shares", "efficiency", "kept", "prompt_tokens", "output_tokens", "seed")  # that SQLite has as text
_NAMES = ", ".join(f'"{name}"' for name in COLUMNS)


@check_arguments
def cells(base: Cell, vary: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Make cells of the base with every combination of these values of its fields."""
    return [base.with_values(**dict(zip(vary, values, strict=True))) for values in product(*vary.values())]


def check(wanted: Sequence[Cell]) -> None:
    """Raise the first cell's InputError if no cell is possible."""
    errors = []
    for cell in wanted:
        try:
            scenario = cell.scenario
            scenario.serving(scenario.option)
            return
        except InputError as error:
            errors.append(error)
    raise errors[0]


def key(cell: Cell) -> str:
    """Name a cell in a file: equal for equal cells.

    A model that is not shipped counts by its config, and files of GPUs and requests by their text, and
    a profile by its content.
    """
    value = cell.to_json()
    value = {name: value[name] for name in value if name not in LATER or value[name] != LATER[name]}
    for name, path in (("hardware", cell.hardware.partition("#")[0]), ("trace", cell.trace)):
        if path is not None and Path(path).is_file():
            value[f"{name}_text"] = sha256(Path(path).read_bytes()).hexdigest()
    if cell.model not in names():
        with suppress(InputError):  # the cell is impossible until there is such a file
            value["config"] = read_config(cell.model)[1]
    if cell.profile is not None and cell.profile not in profile_names():
        with suppress(InputError):
            value["parameters"] = profile(cell.profile).to_json()
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def run_cell(value: dict[str, Any]) -> dict[str, Any]:
    """Compute a cell's metrics, or under `error` the reason it is impossible; with seconds and worker."""
    start = perf_counter()
    try:
        result = Cell.from_json(value).run().metrics() | {"error": None}
    except InputError as error:
        result = {"error": str(error)}
    return result | {"seconds": perf_counter() - start, "worker": f"{socket.gethostname()}:{os.getpid()}"}


class Results:
    """A SQLite file with a row per cell: fields, METRICS, error, seconds, worker.

    Fields are JSON where SQLite has no type. A row is written in one transaction, and stays whatever happens to this
    program.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._file = sqlite3.connect(self.path)
            version = self._version()
            names = ", ".join(f'"{name}"' for name in COLUMNS[1:])
            self._file.execute(f'create table if not exists cells ("key" text primary key, {names})')
            if version == VERSION:
                self._add_later_fields()
            columns = self._columns()
        except sqlite3.OperationalError as error:
            raise InputError("out", str(path), f"a file that can be opened and written ({error})") from error
        except sqlite3.DatabaseError as error:
            raise InputError("out", str(path), f"a new file, or one of an earlier sweep ({error})") from error
        allowed = f"a new file, or one of an earlier sweep of version {VERSION}, not {version}"
        require(version == VERSION, "out", str(path), allowed)
        allowed = "a new file, or one of an earlier sweep (its columns are others)"
        require(columns == set(COLUMNS), "out", str(path), allowed)

    def _columns(self) -> set[str]:
        return {row[1] for row in self._file.execute("pragma table_info(cells)")}

    def _add_later_fields(self) -> None:
        """Add the columns of later fields to a file of an earlier sweep, with their defaults."""
        missing = set(COLUMNS) - self._columns()
        for name in missing if missing <= set(LATER) else ():
            default = "null" if LATER[name] is None else "'[]'" if LATER[name] == () else repr(LATER[name])
            self._file.execute(f'alter table cells add column "{name}" default {default}')

    def _version(self) -> int:
        """Read the version of the file, and write it into a new one."""
        (tables,) = self._file.execute("select count(*) from sqlite_master").fetchone()
        if not tables:
            self._file.execute(f"pragma user_version = {VERSION}")
        (version,) = self._file.execute("pragma user_version").fetchone()
        return version

    def keys(self) -> set[str]:
        return {row[0] for row in self._file.execute("select key from cells")}

    def add(self, cell: Cell, result: dict[str, Any]) -> None:
        """Write one row in a transaction."""
        row = {"key": key(cell), **cell.to_json(), **result}
        values = [_plain(row.get(name)) for name in COLUMNS]
        try:
            with self._file:
                self._file.execute(
                    f"insert or replace into cells ({_NAMES}) values ({', '.join('?' * len(values))})", values
                )
        except sqlite3.Error as error:
            allowed = f"a file that can be written ({error}); finished cells stay in it"
            raise InputError("out", str(self.path), allowed) from error

    def rows(self, wanted: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """Read all rows, or those of some keys in their order."""
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in self._file.execute(f"select {_NAMES} from cells")]
        if wanted is not None:
            rows_by_key = {row["key"]: row for row in rows}
            rows = [rows_by_key[wanted_key] for wanted_key in wanted]
        for row in rows:
            self._check(row)
        return rows

    def _check(self, row: dict[str, Any]) -> None:
        """Raise InputError for a row that no sweep writes: with fields of no cell, or figures of another type."""
        source = f"cell {row['key']} of {self.path}"
        try:
            values = {name: _read(row[name]) if name in JSON_FIELDS else row[name] for name in FIELDS}
            Cell.from_json(values)
        except InputError as error:
            raise error.within(source) from error
        except (TypeError, ValueError, RecursionError, AttributeError) as error:
            raise InputError("out", source, f"a row that a sweep has written ({error})") from error
        for name in METRICS:
            if row[name] is not None:
                read_number(row[name], name, source)
        read_number(row["seconds"], "seconds", source)
        for name in ("key", "worker", "error"):
            is_text = isinstance(row[name], str) or (name == "error" and row[name] is None)
            require(is_text, name, row[name], f"a text (in {source})")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class SweepCounts:
    """Numbers of cells of a sweep."""

    simulated: int
    stored: int  # found in the file


def sweep(
    wanted: Sequence[Cell],
    results: Results,
    executor: Executor,
    done: Callable[[], object] = lambda: None,
    check: Callable[[BaseException | None], object] = lambda _: None,
) -> SweepCounts:
    """Run the cells that the file lacks, equal ones once, and write each when it is done.

    done: called for every cell in the file, cells of earlier sweeps first. check: of `finished`, for the executor.
    """
    named = {key(cell): cell for cell in wanted}
    stored = results.keys()
    missing = {name: cell for name, cell in named.items() if name not in stored}
    num_kept = len(named) - len(missing)
    for _ in range(num_kept):
        done()
    calls = {name: partial(run_cell, cell.to_json()) for name, cell in missing.items()}
    for name, result in finished(executor, calls, lambda name: _description(missing[name], wanted), check):
        results.add(missing[name], result)
        done()
    return SweepCounts(len(missing), num_kept)


def _description(cell: Cell, others: Sequence[Cell]) -> str:
    """Name a cell by the fields in which it differs from others."""
    names = [name for name in FIELDS if any(getattr(other, name) != getattr(cell, name) for other in others)]
    return f"cell {', '.join(f'{name}={getattr(cell, name)}' for name in names)}".rstrip()


def _read(value: Any) -> Any:
    """Read what _plain has made of a tuple, an object or a large integer."""
    is_json = isinstance(value, str) and (value[:1] in ("[", "{") or value.isdecimal())
    return json.loads(value) if is_json else value


def _plain(value: Any) -> Any:
    """Convert a value for SQLite: nan to null; tuples, objects and integers beyond 64 bits to JSON."""
    if isinstance(value, (tuple, list, dict)) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        return json.dumps(value)
    return None if isinstance(value, float) and value != value else value


CHOSEN = (  # fields that an operator chooses; the others, except the seed, are the load
    "topk",
    "num_steps",
    "num_draft_tokens",
    "page_size",
    "schedule",
    "plain_schedule",
    "prefill",
    "chunk_tokens",
    "max_running",
    "memory_share",
    "adaptive",
)
GIVEN = tuple(name for name in FIELDS if name not in (*CHOSEN, "seed"))

Row = Mapping[str, Any]


def rank_by_load(rows: Iterable[Row]) -> list[list[dict[str, Any]]]:
    """Rank the settings of every load, best first.

    A setting has the means of its rows over seeds; rows with errors are dropped. The best has the highest throughput,
    or the lowest mean latency where requests arrive at a rate or at times of a file. Settings within EQUAL of it count
    as equal: they come first, the cheapest of them at the head.
    """
    loads: dict[tuple, dict[tuple, list[Row]]] = {}
    for row in rows:
        if row["error"] is None:
            load = loads.setdefault(tuple(row[name] for name in GIVEN), {})
            load.setdefault(tuple(row[name] for name in CHOSEN), []).append(row)
    return [_ranking([_means(same) for same in load.values()]) for load in loads.values()]


def _means(rows: Sequence[Row]) -> dict[str, Any]:
    """Make the row of a setting, with the means of its metrics over seeds."""
    values_by_metric = {name: [row[name] for row in rows if row[name] is not None] for name in METRICS}
    return {
        **rows[0],
        **{name: float(np.mean(values)) if values else None for name, values in values_by_metric.items()},
    }


def _ranking(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    least = min(map(_cost, rows))
    return sorted(rows, key=lambda row: _rank(_cost(row) / least - 1, row))


def _cost(row: Row) -> float:
    return row["Mean E2E Latency (ms)"] if _has_times(row) else 1 / row["Output Throughput (tok/s)"]


def _has_times(row: Row) -> bool:
    """Whether requests arrive at a rate, or at the times of a file."""
    if row["rate"] is not None or row.get("trace") is None:
        return row["rate"] is not None
    return read_requests(row["trace"], row["tokenizer"], row["characters_per_token"]).arrivals_s is not None


def _rank(regret: float, row: Row) -> tuple[float, ...]:
    if regret > EQUAL:
        return (1, regret)
    steps = row["num_steps"]
    nodes = steps + 1 if row["num_draft_tokens"] is None or not steps else row["num_draft_tokens"]
    return (0, nodes, steps, row["topk"])
