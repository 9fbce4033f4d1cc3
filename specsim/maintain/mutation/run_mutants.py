"""Mutation testing: does a row's test see what goes wrong in the row?

python -m specsim.maintain.mutation.run_mutants --help

Each mutant is planted in a copy of the package and judged by the tests of its row alone, in a checkout.
"""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Annotated

import typer
from tqdm.auto import tqdm

from specsim.core.errors import InputError
from specsim.correctness.faults.injection import environment, path_of, planted, read, sources
from specsim.maintain.mutation.equivalents import EQUIVALENT
from specsim.maintain.mutation.mutants import Mutant, mutants, sample
from specsim.maintain.results import read as read_result

ROOT = Path(__file__).parents[3]
# Of what both columns share: what rounds and servers are made of.
SHARED = (
    *(f"core.{name}" for name in ("columns", "config", "metrics", "phases", "pool", "uniforms")),
    *(f"serving.{name}" for name in ("prefix", "requests", "residents", "runner", "scheduler")),
    "correctness.invariance.solo",
)
PATIENCE, SPARE = 3.0, 60.0  # times what a row's tests take, and seconds besides: then a mutant has no end
PROGRAM = """
import sys, pytest
from importlib.util import find_spec  # pytest wants to be the first to import what it may find plugins in
assert find_spec("specsim").origin.startswith(sys.argv[1]), find_spec("specsim").origin
sys.exit(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", sys.argv[2]]))
"""
SURVIVED, UNJUDGED = 0, (-SIGKILL, 3, 4, 5)  # by lack of memory, or by pytest itself: no test said anything


@dataclass(frozen=True, slots=True)
class Verdict:
    """by: the test that failed, `no end`, or `exit status n`, below 0 for a signal; None for a survivor."""

    mutant: Mutant
    tests: str
    by: str | None
    seconds: float

    @property
    def why_equivalent(self) -> str | None:
        """Why no test could see it, where that has been shown."""
        return None if self.by else EQUIVALENT.get(self.mutant.key)


@dataclass(frozen=True, slots=True)
class Mutation:
    """Verdicts on a seeded sample. num_candidates: of how many it was drawn; seconds: of all."""

    verdicts: tuple[Verdict, ...]
    seed: int
    num_candidates: int
    seconds: float
    is_complete: bool

    @property
    def survivors(self) -> tuple[Verdict, ...]:
        """Those that no test sees, and that are not known to be the same program."""
        return tuple(each for each in self.verdicts if not each.by and not each.why_equivalent)

    def to_json(self) -> dict:
        """A value that json can write."""
        count, killed = len(self.verdicts), sum(each.by is not None for each in self.verdicts)
        equivalent = sum(each.why_equivalent is not None for each in self.verdicts)
        kept = {"module", "function", "is_kernel", "line", "operator", "old", "new"}
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
                {name: value for name, value in asdict(each.mutant).items() if name in kept}
                | {"key": each.mutant.key}
                | {name: getattr(each, name) for name in ("tests", "by", "why_equivalent", "seconds")}
                for each in self.verdicts
            ],
        }


def rows() -> dict[str, Path]:
    """Modules that are mutated, by name, and the tests of each."""
    fast = sources()["specsim.fast"]
    modules = [".".join(("specsim.fast", *path.relative_to(fast).with_suffix("").parts)) for path in fast.rglob("*.py")]
    modules += [f"specsim.{name}" for name in SHARED]
    found = {}
    for module in sorted(modules):
        *_, folder, name = module.split(".")
        tests = [*(ROOT / "tests").glob(f"*/test_{name}.py"), *(ROOT / "tests").glob(f"*/test_{folder}.py")]
        if name != "__init__" and tests:
            found[module] = tests[0]
    return found


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
    """Judge a sample of mutants, of the modules that `only` names, but for those that time and memory do not allow.

    again: a result, of which the survivors are judged anew and the rest is taken over, as far as the lines are still
    there. Tests that fail without a mutant would kill everything: InputError.
    """
    start, found = time.perf_counter(), _chosen(only)
    candidates = {module: mutants(module, read(module)) for module in found}
    seed, judged = _kept(again, candidates) if again else (seed, dict.fromkeys(sample(candidates, count, seed)))
    drawn = [mutant for mutant, verdict in judged.items() if verdict is None]
    deadline = start + 60 * minutes
    with ThreadPoolExecutor(jobs) as pool:
        clean = dict(_clean(pool, {found[mutant.module] for mutant in drawn}))
        waiting = [pool.submit(_judge, each, found[each.module], clean, deadline) for each in drawn]
        bar = tqdm(as_completed(waiting), total=len(drawn), unit="mutant", disable=None if progress else True)
        judged |= {done.result().mutant: done.result() for done in bar if done.result() is not None}
    verdicts = tuple(verdict for verdict in judged.values() if verdict is not None)
    seconds, total = time.perf_counter() - start, sum(map(len, candidates.values()))
    return Mutation(verdicts, seed, total, seconds, len(verdicts) == len(judged))


def _chosen(only: str) -> dict[str, Path]:
    """The modules of these names, with commas between them, or all of them, and their tests."""
    found = rows()
    names = [name for name in only.split(",") if name] or list(found)
    for name in names:
        if name not in found:
            raise InputError("only", name, f"modules that have tests: {', '.join(found) or 'a checkout has some'}")
    return {name: found[name] for name in names}


def _kept(path: Path, candidates: dict[str, list[Mutant]]) -> tuple[int, dict[Mutant, Verdict | None]]:
    """(seed, verdicts) of a kept result; None for a survivor that is not known to be the same program."""
    kept, by_key = read_result(path, "results", "seed", "mutants"), {}
    for each in (each for found in candidates.values() for each in found):
        by_key.setdefault(each.key, []).append(each)
    verdicts = {}
    for each in kept["results"]:
        if by_key.get(each["key"]):
            mutant = by_key[each["key"]].pop(0)
            verdict = Verdict(mutant, each["tests"], each["by"], each["seconds"])
            verdicts[mutant] = verdict if verdict.by or verdict.why_equivalent else None
    return kept["seed"], verdicts


def _clean(pool: ThreadPoolExecutor, files: set[Path]) -> Iterator[tuple[Path, float]]:
    """How long each file's tests take in a copy without a mutant, where they have to pass."""
    runs = pool.map(lambda path: _tested({}, path, 3600.0), sorted(files))
    for path, (status, by, seconds) in zip(sorted(files), runs, strict=True):
        if status != SURVIVED:
            raise InputError("tests", f"{path.name} ({by})", "tests that pass without a mutant")
        yield path, seconds


def _judge(mutant: Mutant, tests: Path, clean: dict[Path, float], deadline: float) -> Verdict | None:
    """None where time is up, and where its tests were ended from outside."""
    if time.perf_counter() > deadline:
        return None
    texts, limit = {mutant.module: mutant.apply(read(mutant.module))}, PATIENCE * clean[tests] + SPARE
    status, by, seconds = _tested(texts, tests, limit)
    if (status or 0) < 0:  # a signal, which is the mutant's own if it comes again
        status, by, seconds = _tested(texts, tests, limit)
    return None if status in UNJUDGED else Verdict(mutant, tests.name, by, seconds)


def _tested(texts: dict[str, str], tests: Path, limit: float) -> tuple[int | None, str | None, float]:
    """(exit status, what ended it, seconds) of a file's tests over a copy with these sources."""
    start = time.perf_counter()
    with planted(texts) as root:
        command = [sys.executable, "-c", PROGRAM, str(root), str(tests)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment(root), capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return None, "no end", time.perf_counter() - start
    by = None
    if done.returncode != SURVIVED:
        failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        by = failed[0].partition("::")[2] or failed[0] if failed else f"exit status {done.returncode}"
    return done.returncode, by, time.perf_counter() - start


def show(result: Mutation, say: Callable[[str], None]) -> None:
    """The survivors, then the score."""
    for each in result.survivors:
        mutant = each.mutant
        say(f"{path_of(mutant.module).name}, line {mutant.line}, {mutant.function}: {mutant.operator}")
        say(f"    {mutant.before}")
        say(f"    {mutant.after}")
    value = result.to_json()
    kernels = f"{value['in_kernels']} in kernels"
    say(f"\n{value['mutants']} mutants of {value['candidates']} candidates ({kernels}), seed {value['seed']}, ")
    raw, score = f"{value['score_raw']:.1%}", f"{value['score']:.1%}"
    if not result.is_complete:
        say("not all that were drawn: time was up, or tests were ended from outside, as without memory")
    say(f"{value['killed']} killed: {raw}; {score} without {value['equivalent']} that are equivalent")


def command(
    count: Annotated[int, typer.Option("--mutants", help="How many are drawn.")] = 300,
    seed: Annotated[int, typer.Option(help="Names the sample.")] = 0,
    only: Annotated[str, typer.Option(help="Modules, with commas between them.", show_default="all")] = "",
    again: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A result, whose survivors are judged anew.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the mutants.")] = 2,
    minutes: Annotated[float, typer.Option(help="Begin no further mutant after these.")] = 60.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """Change the code at random, and see whether each row's tests notice."""
    from specsim.core.files import check_writable, write_json

    check_writable(json_file)
    result = mutate(count, seed, only=only, again=again, jobs=jobs, minutes=minutes, progress=True)
    try:
        show(result, print)
    finally:
        write_json(json_file, result.to_json())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input is one sentence and exit status 2."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app(arguments, prog_name="python -m specsim.maintain.mutation.run_mutants")
    except InputError as error:
        print(f"specsim: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
