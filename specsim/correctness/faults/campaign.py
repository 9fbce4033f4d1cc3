"""Running the catalogue: every fault in a copy of the package, judged in a process of its own.

Each judge is asked twice in each setting: of the package as it is, where it has to be silent, and of the copy with the
fault. So what it then finds is the fault's doing, and the field that it names is what a fault is known by.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from specsim.core.errors import InputError
from specsim.core.provenance import now, versions
from specsim.correctness.faults.checks import INTERPRETED
from specsim.correctness.faults.fault import Fault, Finding, Trial
from specsim.correctness.faults.injection import changed, environment, planted

if TYPE_CHECKING:
    from rich.console import Console

SECONDS = 300.0  # of one process; one that takes longer has met a loop without end


@dataclass(frozen=True, slots=True)
class Exhibit:
    """What came of a fault.

    findings: every field that the judge found wrong, the first cause first. before: what the same judge finds in the
    package as it is; it should be nothing.
    """

    fault: Fault
    findings: tuple[Finding, ...]
    before: tuple[Finding, ...]
    seconds: float

    @property
    def is_killed(self) -> bool:
        """Whether its judge finds it, and finds nothing without it."""
        return bool(self.findings) and not self.before

    @property
    def first(self) -> Finding | None:
        """The finding by which it is known: of its fields the first to be wrong, else the first of all."""
        named = (each for each in self.findings if each.field in self.fault.fields)
        return next(named, self.findings[0] if self.findings else None)

    @property
    def is_as_named(self) -> bool:
        """Whether it is killed by a field that its entry names."""
        return self.is_killed and self.first.field in self.fault.fields

    def to_json(self) -> dict[str, Any]:
        """A value that json can write."""
        fault, first = self.fault, self.first
        about = {name: getattr(fault, name) for name in ("source", "operation", "cause", "symptom", "code")}
        return {
            "name": fault.name,
            "killed": self.is_killed,
            "by": first and first.field,
            "first_divergence": first and asdict(first),
            "as_named": self.is_as_named,
            "judge": fault.trial.judge,
            "setting": dict(fault.trial.setting),
            "fields": [each.field for each in self.findings],
            "without_it": [each.field for each in self.before],
            **about,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All exhibits, in the order of their faults. device: where the fast column ran."""

    exhibits: tuple[Exhibit, ...]
    device: str
    seconds: float
    date: str
    versions: dict[str, str]
    command: str = ""

    @property
    def escaped(self) -> tuple[Exhibit, ...]:
        """Those that are not killed by a field that they are named by."""
        return tuple(each for each in self.exhibits if not each.is_as_named)

    def to_json(self) -> dict[str, Any]:
        """A value that json can write."""
        return {
            "command": self.command,
            "device": self.device,
            "versions": self.versions,
            "date": self.date,
            "faults": len(self.exhibits),
            "killed": sum(each.is_killed for each in self.exhibits),
            "as_named": sum(each.is_as_named for each in self.exhibits),
            "seconds": self.seconds,
            "results": [each.to_json() for each in self.exhibits],
        }

    def show(self, console: "Console") -> None:
        """A line a fault, and the verdict in words."""
        from specsim.core.display import figure, paragraph, print_table

        rows = [_cells(each) for each in self.exhibits]
        print_table(console, ("fault", "planted in", "judge", "killed by", "seconds"), rows)
        console.print()
        for each in self.escaped:
            paragraph(console, f"{each.fault.name}: {_told(each)}")
        killed, count = sum(each.is_as_named for each in self.exhibits), len(self.exhibits)
        paragraph(
            console, f"{killed} of {count} killed by the field that names them; {figure(self.seconds, 0)} seconds."
        )


def _cells(exhibit: Exhibit) -> tuple[str, ...]:
    fault, first = exhibit.fault, exhibit.first
    by = first.field if exhibit.is_as_named else "NOT as named" if exhibit.is_killed else "NOT killed"
    return fault.name, fault.code, fault.trial.judge, by, f"{exhibit.seconds:.1f}"


def _told(exhibit: Exhibit) -> str:
    if exhibit.before:
        return f"its judge is not silent without it: {exhibit.before[0]}."
    if not exhibit.findings:
        return "nothing is found."
    return f"found is {exhibit.first}; it is named by {' or '.join(exhibit.fault.fields)}."


def exhibit(
    names: Sequence[str] | None = None, *, device: str | None = None, jobs: int = 2, progress: bool = False
) -> Catalogue:
    """Plant the faults of these names (None: all), and judge each in a process of its own, `jobs` at a time."""
    from specsim.core.engine_options import check_device
    from specsim.correctness.faults.catalogue import FAULTS

    if type(jobs) is not int or jobs < 1:
        raise InputError("jobs", jobs, "an integer of at least 1")
    known = {fault.name: fault for fault in FAULTS}
    for name in names or ():
        if name not in known:
            raise InputError("name", name, ", ".join(known))
    device, date, start = check_device(device), now(), time.perf_counter()
    faults = [known[name] for name in names or known]
    found = _exhibits(faults, device, jobs)
    bar = tqdm(found, total=len(faults), unit="fault", disable=None if progress else True)
    exhibits = {each.fault.name: each for each in bar}
    in_order = tuple(exhibits[fault.name] for fault in faults)
    return Catalogue(in_order, device, time.perf_counter() - start, date, versions(device))


def _exhibits(faults: Sequence[Fault], device: str, jobs: int) -> Iterator[Exhibit]:
    """As they are there. Trials of the package as it is are shared out to as many processes as may run at a time."""
    texts = {fault.name: changed(fault.edits) for fault in faults}  # a stale plant ends it before anything runs
    trials = {_key(fault.trial): fault.trial for fault in faults}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            before: dict[str, tuple[int, Future]] = {}
            for keys in _shares(trials, jobs):
                share = pool.submit(_judged, {}, [trials[key] for key in keys], device)
                before |= {key: (place, share) for place, key in enumerate(keys)}
            waiting = {pool.submit(_timed, texts[fault.name], fault.trial, device): fault for fault in faults}
            for done in as_completed(waiting):
                fault, (seconds, found) = waiting[done], done.result()
                place, share = before[_key(fault.trial)]
                yield Exhibit(fault, found, share.result()[place], seconds)
        finally:  # an error or an interruption does not wait for the rest
            pool.shutdown(cancel_futures=True)


def _shares(trials: Mapping[str, Trial], jobs: int) -> Iterator[list[str]]:
    """Keys of trials that can share a process: as many shares as jobs, and those of interpreted kernels apart."""
    apart = [key for key, trial in trials.items() if trial.judge in INTERPRETED]
    others = [key for key in trials if key not in apart]
    yield from filter(None, (*(others[first::jobs] for first in range(jobs)), apart))


def _key(trial: Trial) -> str:
    return json.dumps(asdict(trial))


def _timed(texts: dict[str, str], trial: Trial, device: str) -> tuple[float, tuple[Finding, ...]]:
    start = time.perf_counter()
    (found,) = _judged(texts, [trial], device)
    return time.perf_counter() - start, found


def _judged(texts: dict[str, str], trials: Sequence[Trial], device: str) -> list[tuple[Finding, ...]]:
    """The findings of each trial in a copy of the package with these sources; its process is ended after SECONDS each.

    That the process ends otherwise than it should is a finding too.
    """
    device = "cpu" if trials[0].judge in INTERPRETED else device
    with planted(texts) as root:
        asked = {"root": str(root), "device": device, "trials": [asdict(trial) for trial in trials]}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "specsim.correctness.faults.trial"], input=json.dumps(asked),
                env=environment(root, device),
                cwd=root, capture_output=True, text=True, timeout=SECONDS * len(trials), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [(Finding("no end", "the process", f"an end within {SECONDS:.0f} seconds", None),)] * len(trials)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return [(Finding("crash", "the process", "exit status 0", f"{done.returncode}: {last}"),)] * len(trials)
    return [tuple(Finding(**each) for each in found) for found in json.loads(done.stdout)]
