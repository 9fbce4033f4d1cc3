"""Runs of a grid's cells: engines, oracle, and a JSON file that is rewritten after every cell."""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from tqdm.auto import tqdm

from specsim.core.children import ProcessLost
from specsim.core.engine_options import EngineOptions, check_device
from specsim.core.errors import InputError, require, require_type
from specsim.core.files import read_json, write_json
from specsim.core.json_schema import schema_name
from specsim.core.pair import Pair
from specsim.core.provenance import now, versions
from specsim.core.workers import Workers, finished
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.comparison import Tally, Trio
from specsim.correctness.differential.implementation import (
    ALONE,
    Implementation,
    Shares,
    load_implementation,
    load_implementations,
)
from specsim.correctness.differential.lockstep import Lockstep
from specsim.correctness.differential.oracle import compare_with_oracle
from specsim.correctness.differential.pairs import make_pair, perturbed, rounded
from specsim.correctness.differential.result import IDENTITY, CellResult, GridResult

DTYPES = ("float32", "bfloat16")
PERTURBATION_RUNS = 3


@torch.inference_mode()
def check(
    cell: Cell,
    impl: str = "fast",
    dtype: str = "float32",
    device: str | None = None,
    wrap: Callable[[Implementation], Implementation] = lambda implementation: implementation,
    pair: Pair | None = None,
    shares: Shares = ALONE,
) -> CellResult:
    """Compare the implementations in one cell, and the reference with the oracle.

    wrap: changes the implementation under test. pair: used instead of the cell's. shares: ranks of this process's
    group, which all compare the cell at once; rank 0 compares the reference with the oracle.
    """
    start = time.perf_counter()
    precision = getattr(torch, dtype)
    pair = make_pair(cell.pair, precision) if pair is None else rounded(pair, precision)
    tally = Tally(budgets=perturbation_budgets(cell, pair, dtype))
    loaded = load_implementations(cell, pair, impl, dtype, device, shares)
    lockstep = Lockstep(cell, pair, loaded._replace(fast=wrap(loaded.fast)), tally)
    lockstep.run()
    ranks = loaded.fast.ranks
    of_oracle = compare_with_oracle(cell, pair) if ranks is None or ranks.rank == 0 else ()
    divergences = [*lockstep.divergences, *of_oracle]
    return CellResult(
        id=cell.id,
        mismatches=len(divergences),
        within_rounding_error=tally.within_rounding_error,
        decisions=tally.decisions,
        max_logprob_error=tally.max_logprob_error,
        compared=dict(tally.compared),
        not_compared=dict(tally.not_compared),
        coverage={name: int(count) for name, count in tally.coverage.items()},
        fields={name: int(count) for name, count in tally.fields.items()},
        seconds=time.perf_counter() - start,
        first_divergence=divergences[0] if divergences else None,
    )


def perturbation_budgets(cell: Cell, pair: Pair, dtype: str) -> dict[str, float]:
    """Measure budgets of every field by runs of the reference with every weight perturbed by up to one ulp.

    The distance of such a run from the exact one shows how far rounding carries in this cell. A single reference may be
    right by luck. Under `lockstep` all such runs follow one reference and one exact run. Under `free` each has its own,
    since a run that diverges also realigns the exact one. The implementation under test does not enter the budgets.
    """
    tally = Tally(is_perturbation=True)
    cell = replace(cell, rounds=2, is_idle_too=False)
    options = EngineOptions(dtype=getattr(torch, dtype))
    runs = [load_implementation(cell, perturbed(pair, seed), options) for seed in range(PERTURBATION_RUNS)]
    for first, *others in [runs] if cell.mode == "lockstep" else [[run] for run in runs]:
        reference = load_implementation(cell, pair, options)
        exact = load_implementation(cell, pair, EngineOptions(dtype=torch.float64))
        Lockstep(cell, pair, Trio(reference, exact, first), tally, tuple(others)).run()
    return tally.budgets


def run_grid(
    name: str,
    cells: Sequence[Cell],
    *,
    impl: str = "fast",
    dtype: str = "float32",
    device: str | None = None,
    shard: str | None = None,
    resume: bool = False,
    json_file: Path | None = None,
    jobs: int = 1,
    progress: bool = False,
    shares: Shares = ALONE,
) -> GridResult:
    """Check every cell, or the i-th of n shards of them (`i/n`: cells i-1, i-1+n, …), in `jobs` processes.

    shares: ranks that run this grid together, one process each. json_file is rewritten after every cell; resume takes
    over the cells it holds.
    """
    _check_options(dtype, jobs, shares)
    require(not resume or json_file is not None, "resume", resume, "with a JSON file of an earlier run")
    require(cells, "grid", name, "a grid that has cells for these options")
    shard_cells = _shard(cells, shard)
    order = {cell.id: index for index, cell in enumerate(cells)}
    device = _checked_device(impl, device)
    command = f"specsim diff --grid {name} --device {device} --dtype {dtype}{_ranks_text(shares)}"
    result = GridResult(
        grid=name,
        fingerprint=sha256(repr(list(cells)).encode()).hexdigest()[:16],
        num_cells=len(cells),
        device=device,
        dtype=dtype,
        impl=impl,
        versions=versions(device),
        date=now(),
        command="" if name == "one cell" else command,
        required=() if name == "one cell" else required(cells, impl),
        cells=(),
    )
    done = _resumed(json_file, result, order) if resume and json_file is not None else {}
    results = list(done.values())
    remaining = [cell for cell in shard_cells if cell.id not in done]
    check_one = partial(check, impl=impl, dtype=dtype, device=device, shares=shares)
    with (
        _naming_stored(json_file, results, len(shard_cells)),
        closing(_checked(remaining, jobs, check_one)) as arriving,
        tqdm(total=len(shard_cells), initial=len(done), unit="cell", disable=None if progress else True) as bar,
    ):
        for cell_result in arriving:
            results.append(cell_result)
            bar.update()
            write_json(json_file, replace(result, cells=tuple(results)).to_json())
    result = replace(result, cells=tuple(sorted(results, key=lambda cell: order[cell.id])))
    write_json(json_file, result.to_json())
    return result


@contextmanager
def _naming_stored(json_file: Path | None, results: Sequence[CellResult], num_cells: int) -> Iterator[None]:
    """Add the finished cells to the sentence about a lost process."""
    try:
        yield
    except ProcessLost as lost:
        if json_file is not None and results:
            lost.stored = f"{len(results)} of {num_cells} cells are in {json_file}, where --resume goes on"
        raise


def _checked_device(impl: str, device: str | None) -> str:
    require(impl == "fast" or device in (None, "cpu"), "device", device, "cpu with impl 'reference'")
    return check_device(device) if impl == "fast" else "cpu"


def _check_options(dtype: str, jobs: int, shares: Shares) -> None:
    if jobs < 1:
        raise InputError("jobs", jobs, "an integer of at least 1")
    if jobs > 1 and shares.tensor_parallel > 1:
        raise InputError("jobs", jobs, "1 with tensor_parallel, whose ranks are processes already")
    if dtype not in DTYPES:
        raise InputError("dtype", dtype, " or ".join(DTYPES))


def required(cells: Sequence[Cell], impl: str) -> tuple[str, ...]:
    """List the coverage that these cells have to reach together; only the fast implementation pads batches."""
    deepest = max((cell.config.num_steps for cell in cells), default=0)
    names = ["rounds", *(f"accepted {count}" for count in range(deepest + 1)), "rejections", "page crossings"]
    names += ["first column of a page", "last column of a page", "ties", "dropped rows"]
    if any(cell.drafter and not cell.drafter.has_weights for cell in cells):
        names += ["drafts", "rounds without drafts"]
    return (*names, *(["padded rows"] if impl == "fast" else []))


def _ranks_text(shares: Shares) -> str:
    options = {"tensor-parallel": shares.tensor_parallel, "draft-parallel": shares.draft_parallel}
    options = options if shares.tensor_parallel > 1 else {}
    options |= {} if shares.forward == "auto" else {"forward": shares.forward}
    return "".join(f" --{name} {value}" for name, value in options.items())


def _checked(cells: Sequence[Cell], jobs: int, check_one: Callable[[Cell], CellResult]) -> Generator[CellResult]:
    """Yield results as cells end; each process uses one thread."""
    if jobs == 1 or len(cells) == 1:
        yield from map(check_one, cells)
        return
    with Workers(jobs, partial(torch.set_num_threads, 1)) as workers:
        calls = {cell.id: partial(check_one, cell) for cell in cells}
        yield from (result for _, result in finished(workers, calls, "cell {}".format))


def _shard(cells: Sequence[Cell], shard: str | None) -> Sequence[Cell]:
    if shard is None:
        return cells
    index, slash, count = shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count) <= len(cells)):
        raise InputError("shard", shard, f"i/n with i from 1 to n, and n at most the {len(cells)} cells")
    return cells[int(index) - 1 :: int(count)]


def _resumed(path: Path, result: GridResult, cells: Collection[str]) -> dict[str, CellResult]:
    """Read the results of these cells from an earlier run of the same grid; a missing file holds none."""
    if not path.exists():
        return {}
    allowed = "a result of this grid to resume"
    value = read_json(path, "json", allowed)
    require(isinstance(value, dict), "json", str(path), allowed)
    if (version := value.get("schema")) != schema_name("diff"):
        allowed = f"a file of schema {schema_name('diff')}, not {version}; without --resume it starts again"
        raise InputError("json", str(path), allowed)
    expected = {name: getattr(result, name) for name in IDENTITY}
    for name in IDENTITY:
        require(name in value, "json", str(path), f"{allowed} (it has no {name})")
        if value[name] != expected[name]:
            raise InputError("json", f"{path} ({name} {value[name]})", f"a result of the same {name}, {expected[name]}")
    results: dict[str, CellResult] = {}
    try:
        require_type("results", value.get("results"), list, "a list of cells")
        for index, entry in enumerate(value["results"]):
            cell = CellResult.from_json(entry, f"results[{index}]")
            require(
                cell.id in cells and cell.id not in results, f"results[{index}].id", cell.id, "another cell of the grid"
            )
            results[cell.id] = cell
    except InputError as error:
        raise InputError("json", str(path), f"{allowed} ({error})") from error
    return results
