"""Mutation testing: runs of a module's tests over small changes of its code.

python tests/tools/run_mutants.py --help

Each mutant is injected into a copy of the package and tested only by the test files of its module, in a checkout.
"""

import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple, Self

import click
from equivalents import EQUIVALENT
from mutants import Mutant, mutants, sample
from tqdm.auto import tqdm

from specsim.core.errors import InputError, require, require_int, require_type
from specsim.core.files import check_writable, write_json
from specsim.core.json_schema import read_dataclass
from specsim.correctness.faults.fault import copied_package, environment, path_of, read
from specsim.maintain.results import read as read_result

ROOT = Path(__file__).parents[2]
# Shared modules of both implementations; those of fast/ are mutated too.
SHARED = (
    *(f"core.{name}" for name in ("columns", "config", "metrics", "phases", "pool", "uniforms")),
    *(f"serving.{name}" for name in ("admission", "prefix", "requests", "reservations", "runner", "scheduler")),
    "correctness.invariance.solo",
)
# Tests over a mutant may take this many times their usual time, and these seconds more.
PATIENCE = 3.0
SPARE = 60.0
MOST_FILES = 6  # test files of a module outside kernels and what serves them
PROGRAM = """
import sys, pytest
from importlib.util import find_spec  # pytest wants to be the first to import what it may find plugins in
assert find_spec("specsim").origin.startswith(sys.argv[1]), find_spec("specsim").origin
status = pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", *sys.argv[2:]])
assert sys.modules["specsim"].__file__.startswith(sys.argv[1]), sys.modules["specsim"].__file__
sys.exit(status)
"""
SURVIVED = 0
NO_VERDICT = (-SIGKILL, 3, 4, 5)  # ended for lack of memory, or by pytest itself: no test ran to its end
FIELDS = ("module", "function", "is_kernel", "line", "operator", "old", "new")  # of a mutant, in the JSON


@dataclass(frozen=True, slots=True)
class MutantVerdict:
    """Outcome of a module's tests over one mutant."""

    mutant: Mutant
    tests: str  # name of the test file
    by: str | None  # failed test, `no end`, or `exit status n`, below 0 for a signal; None for a survivor
    seconds: float

    @property
    def why_equivalent(self) -> str | None:
        """Proof that no test can see the mutant, where there is one."""
        return None if self.by else EQUIVALENT.get(self.mutant.key)


@dataclass(frozen=True, slots=True)
class KeptVerdict:
    """A verdict in the JSON of an earlier run."""

    key: str  # of the mutant
    tests: str
    by: str | None
    seconds: float

    @classmethod
    def of(cls, row: Any, name: str) -> Self:
        """Read a row of the results; InputError, which begins with the name, for anything else."""
        names = [field.name for field in fields(cls)]
        known = {key: row[key] for key in names if key in row} if isinstance(row, dict) else row
        return read_dataclass(cls, known, name)


@dataclass(frozen=True, slots=True)
class Mutation:
    """Verdicts on a seeded sample of mutants."""

    verdicts: tuple[MutantVerdict, ...]
    seed: int
    num_candidates: int  # mutants that the sample was drawn from
    seconds: float
    is_complete: bool  # every drawn mutant has a verdict

    @property
    def survivors(self) -> tuple[MutantVerdict, ...]:
        """Mutants that no test sees and that are not known to be the same program."""
        return tuple(each for each in self.verdicts if not each.by and not each.why_equivalent)

    def to_json(self) -> dict[str, Any]:
        """Value that json can write."""
        count = len(self.verdicts)
        killed = sum(each.by is not None for each in self.verdicts)
        equivalent = sum(each.why_equivalent is not None for each in self.verdicts)
        return {
            "seed": self.seed,
            "candidates": self.num_candidates,
            "is_complete": self.is_complete,
            "mutants": count,
            "in_kernels": sum(each.mutant.is_kernel for each in self.verdicts),
            "killed": killed,
            "equivalent": equivalent,
            "score_raw": killed / max(1, count),
            "score": killed / max(1, count - equivalent),
            "seconds": self.seconds,
            "operators": dict(Counter(each.mutant.operator for each in self.verdicts)),
            "results": [
                {name: value for name, value in asdict(each.mutant).items() if name in FIELDS}
                | {"key": each.mutant.key}
                | {name: getattr(each, name) for name in ("tests", "by", "why_equivalent", "seconds")}
                for each in self.verdicts
            ],
        }


def show(result: Mutation, say: Callable[[str], None]) -> None:
    """Print the survivors, then the score."""
    for each in result.survivors:
        mutant = each.mutant
        say(f"{path_of(mutant.module).name}, line {mutant.line}, {mutant.function}: {mutant.operator}")
        say(f"    {mutant.before}")
        say(f"    {mutant.after}")
    value = result.to_json()
    kernels = f"{value['in_kernels']} in kernels"
    say(f"\n{value['mutants']} mutants of {value['candidates']} candidates ({kernels}), seed {value['seed']}, ")
    if not result.is_complete:
        say("not all that were drawn: time was up, or tests were ended from outside, as without memory")
    equivalent = f"{value['score']:.1%} without {value['equivalent']} that are equivalent"
    say(f"{value['killed']} killed: {value['score_raw']:.1%}; {equivalent}")


class TestsOutcome(NamedTuple):
    """End of a run of test files."""

    status: int | None  # None: stopped at the time limit
    by: str | None  # first failed test, `no end`, or `exit status n`; None where all passed
    seconds: float


def modules_with_tests(only: Collection[str] = ()) -> dict[str, tuple[Path, ...]]:
    """Find the modules that are mutated, and the test files of each: of its name, else of its folder's.

    only: modules or folders of the package, whose tests include those of their room that import them.
    """
    modules = list(_modules(only or ["specsim.fast"])) + [f"specsim.{name}" for name in SHARED if not only]
    paired = {}
    for module in sorted(modules):
        *_, folder, name = module.split(".")
        tests = _room_tests(module) if only else ()
        tests = tests or _test_files(name) or _test_files(folder)
        if name != "__init__" and tests:
            paired[module] = tests
    return paired


def _modules(names: Iterable[str]) -> Iterator[str]:
    """List modules, and those of folders."""
    for name in names:
        path = path_of(name)
        if path.name != "__init__.py":
            yield name
            continue
        for file in path.parent.rglob("*.py"):
            yield ".".join((name, *file.relative_to(path.parent).with_suffix("").parts))


def _test_files(name: str, room: str = "*") -> tuple[Path, ...]:
    patterns = (f"{room}/test_{name}.py", f"{room}/test_{name}_*.py")
    return tuple(sorted(path for pattern in patterns for path in (ROOT / "tests").glob(pattern)))


def _room_tests(module: str) -> tuple[Path, ...]:
    """Find the test files of a module's room: those of its name, its importers, or else those of its users."""
    room, name = module.split(".")[1], module.rpartition(".")[2]
    tests = [*_test_files(name, room), *_importers(module, (ROOT / "tests" / room).glob("test_*.py"))]
    if not tests:
        users = _importers(module, path_of(module).parent.glob("*.py"))
        tests = [test for user in users if user.stem != "__init__" for test in _test_files(user.stem, room)]
    return tuple(dict.fromkeys(tests))[:MOST_FILES]


def _importers(module: str, files: Iterable[Path]) -> list[Path]:
    package, _, name = module.rpartition(".")
    line = re.compile(rf"^\s*((from|import) {module}|from {package} import .*\b{name})\b", re.MULTILINE)
    return [path for path in sorted(files) if line.search(path.read_text(encoding="utf-8"))]


def mutate(
    count: int,
    seed: int,
    *,
    only: str = "",
    again: Path | None = None,
    jobs: int = 2,
    minutes: float = 60.0,
    progress: bool = False,
) -> Mutation:
    """Test a sample of the mutants of the modules in `only`, as far as time and memory allow.

    again: an earlier result; its survivors are tested again and its other verdicts are kept, for lines that still
    exist. Raises InputError where tests fail without a mutant, because they would kill everything.
    """
    require_int("mutants", count)
    require_int("jobs", jobs)
    start = time.perf_counter()
    tests = _chosen(only)
    candidates = {module: mutants(module, read(module)) for module in tests}
    seed, verdicts = _kept(again, candidates) if again else (seed, dict.fromkeys(sample(candidates, count, seed)))
    drawn = [mutant for mutant, verdict in verdicts.items() if verdict is None]
    deadline = start + 60 * minutes
    with ThreadPoolExecutor(jobs) as pool:
        limits = _limits(pool, {tests[mutant.module] for mutant in drawn})
        waiting = [
            pool.submit(_verdict, each, tests[each.module], limits[tests[each.module]], deadline) for each in drawn
        ]
        for done in tqdm(as_completed(waiting), total=len(drawn), unit="mutant", disable=None if progress else True):
            if verdict := done.result():
                verdicts[verdict.mutant] = verdict
    found = tuple(verdict for verdict in verdicts.values() if verdict is not None)
    num_candidates = sum(map(len, candidates.values()))
    return Mutation(found, seed, num_candidates, time.perf_counter() - start, len(found) == len(verdicts))


def _chosen(only: str) -> dict[str, tuple[Path, ...]]:
    """Tests of the modules and folders in `only`, with commas between them; of the usual modules where it is empty."""
    names = [name for name in only.split(",") if name]
    for name in names:
        require(path_of(name).is_file(), "only", name, "modules that have tests, and their folders")
    paired = modules_with_tests(names) if names else modules_with_tests()
    require(paired, "only", only, f"modules that have tests in {ROOT / 'tests'}")
    return paired


def _kept(path: Path, candidates: dict[str, list[Mutant]]) -> tuple[int, dict[Mutant, MutantVerdict | None]]:
    """Seed and verdicts of a kept result; None for a survivor that is not known to be the same program."""
    kept = read_result(path, "results", "seed", "mutants")
    require_int("seed", kept["seed"], 0)
    require_type("results", kept["results"], list, f"a list of verdicts in {path}")
    by_key: dict[str, list[Mutant]] = defaultdict(list)
    for each in (each for found in candidates.values() for each in found):
        by_key[each.key].append(each)
    verdicts = {}
    for place, row in enumerate(kept["results"]):
        each = KeptVerdict.of(row, f"results[{place}]")
        if by_key[each.key]:
            mutant = by_key[each.key].pop(0)
            verdict = MutantVerdict(mutant, each.tests, each.by, each.seconds)
            verdicts[mutant] = verdict if verdict.by or verdict.why_equivalent else None
    return kept["seed"], verdicts


def _limits(pool: ThreadPoolExecutor, tests: Iterable[tuple[Path, ...]]) -> dict[tuple[Path, ...], float]:
    """Seconds that tests may take over a mutant; they have to pass without one."""
    tests = sorted(tests)
    limits = {}
    for files, outcome in zip(tests, pool.map(lambda files: _tested({}, files, 3600.0), tests), strict=True):
        if outcome.status != SURVIVED:
            raise InputError("tests", f"{_names(files)} ({outcome.by})", "tests that pass without a mutant")
        limits[files] = PATIENCE * outcome.seconds + SPARE
    return limits


def _verdict(mutant: Mutant, tests: tuple[Path, ...], limit: float, deadline: float) -> MutantVerdict | None:
    """Test a mutant; None after the deadline, and where the tests were ended from outside."""
    if time.perf_counter() > deadline:
        return None
    texts = {mutant.module: mutant.apply(read(mutant.module))}
    outcome = _tested(texts, tests, limit)
    if (outcome.status or 0) < 0:  # a signal, which is the mutant's own if it comes again
        outcome = _tested(texts, tests, limit)
    return None if outcome.status in NO_VERDICT else MutantVerdict(mutant, _names(tests), outcome.by, outcome.seconds)


def _names(tests: Iterable[Path]) -> str:
    return " ".join(path.name for path in tests)


def _tested(texts: dict[str, str], tests: Iterable[Path], limit: float) -> TestsOutcome:
    """Run test files over a copy of the package with these sources."""
    start = time.perf_counter()
    with copied_package(texts) as root:
        config = ROOT / "pyproject.toml"
        command = [sys.executable, "-c", PROGRAM, str(root), f"--config-file={config}", *map(str, tests)]
        environ = environment(root)
        try:
            # In a folder without this package: a module of the current folder with another's name is refused.
            done = subprocess.run(command, cwd=root.parent, env=environ, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return TestsOutcome(None, "no end", time.perf_counter() - start)
    by = None
    if done.returncode != SURVIVED:
        failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        by = failed[0].partition("::")[2] or failed[0] if failed else f"exit status {done.returncode}"
    return TestsOutcome(done.returncode, by, time.perf_counter() - start)


@click.command()
@click.option("--mutants", "count", default=300, help="Number of mutants.")
@click.option("--seed", default=0, help="Seed of the sample.")
@click.option("--only", default="", help="Modules or folders, comma-separated. Default: kernels and their users.")
@click.option("--again", type=Path, metavar="FILE", help="A result, whose survivors are tested again.")
@click.option("--jobs", default=2, help="Processes that share the mutants.")
@click.option("--minutes", default=60.0, help="Begin no further mutant after these.")
@click.option("--json", "json_file", type=Path, help="Also write the result here.")
def command(
    count: int, seed: int, only: str, again: Path | None, jobs: int, minutes: float, json_file: Path | None
) -> None:
    """Change the code at random, and see whether each module's tests notice."""
    check_writable(json_file)
    result = mutate(count, seed, only=only, again=again, jobs=jobs, minutes=minutes, progress=True)
    try:
        show(result, print)
    finally:
        write_json(json_file, result.to_json())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input is one sentence and exit status 2."""
    try:
        command(arguments, prog_name="python tests/tools/run_mutants.py")
    except InputError as error:
        print(f"specsim: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
