"""Campaign over the catalogue: each fault is injected into a copy of the package and checked in its own process.

Each check runs twice in each setting: on the package as it is, where it has to find nothing, and on the copy with the
fault. So its findings are caused by the fault, and the field that it names identifies the fault.
"""

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from subprocess import TimeoutExpired
from typing import Any

from rich.console import Console
from tqdm.auto import tqdm

from specsim.core.arguments import check_arguments
from specsim.core.children import (
    KILLED,
    KillableProcess,
    ProcessLost,
    ProcessThreads,
    child_words,
    describe_end,
    run_child,
)
from specsim.core.display import figure, paragraph, print_table
from specsim.core.errors import require
from specsim.core.limits import JobCount
from specsim.core.provenance import now, versions
from specsim.core.workers import finished
from specsim.correctness.faults.checks import INTERPRETED
from specsim.correctness.faults.fault import Fault, FaultFinding, Trial, changed, copied_package, environment

TrialFindings = tuple[FaultFinding, ...]
TimedFindings = tuple[float, list[TrialFindings]]  # seconds, and findings of each trial
ProcessWatch = Callable[[KillableProcess], None]
SECONDS = 300.0  # of one process; one that takes longer is in an endless loop


@dataclass(frozen=True, slots=True)
class FaultResult:
    """Result for one fault."""

    fault: Fault
    findings: tuple[FaultFinding, ...]  # every field that the check found wrong, the first cause first
    before: tuple[FaultFinding, ...]  # findings of the same check in the package as it is; there should be none
    seconds: float

    @property
    def is_detected(self) -> bool:
        """Whether its check finds something, and finds nothing without the fault."""
        return bool(self.findings) and not self.before

    @property
    def first(self) -> FaultFinding | None:
        """The identifying finding: the first in one of the fault's fields, else the first of all."""
        named = (finding for finding in self.findings if finding.field in self.fault.fields)
        return next(named, self.findings[0] if self.findings else None)

    @property
    def is_detected_as_named(self) -> bool:
        """Whether it is detected by a field that its entry names."""
        return self.is_detected and self.first is not None and self.first.field in self.fault.fields

    def to_json(self) -> dict[str, Any]:
        """Give a value that json can write."""
        fault = self.fault
        first = self.first
        about = {name: getattr(fault, name) for name in ("source", "operation", "cause", "symptom", "code")}
        return {
            "name": fault.name,
            "detected": self.is_detected,
            "detected_by": first and first.field,
            "first_divergence": first and asdict(first),
            "detected_as_named": self.is_detected_as_named,
            "check": fault.trial.check,
            "setting": dict(fault.trial.setting),
            "fields": [finding.field for finding in self.findings],
            "fields_without_fault": [finding.field for finding in self.before],
            **about,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class CatalogueResult:
    """Results for all faults."""

    results: tuple[FaultResult, ...]  # in the order of their faults
    device: str  # the fast implementation ran there
    seconds: float  # wall-clock time of the run, in seconds
    date: str  # date and time of the run in UTC, to the second
    versions: dict[str, str]
    command: str = ""  # command line that gives the same result

    @property
    def missed(self) -> tuple[FaultResult, ...]:
        """List the faults that no field named by their entry detects."""
        return tuple(result for result in self.results if not result.is_detected_as_named)

    def to_json(self) -> dict[str, Any]:
        """Give a value that json can write."""
        return {
            "command": self.command,
            "device": self.device,
            "versions": self.versions,
            "date": self.date,
            "faults": len(self.results),
            "detected": sum(result.is_detected for result in self.results),
            "detected_as_named": sum(result.is_detected_as_named for result in self.results),
            "seconds": self.seconds,
            "results": [result.to_json() for result in self.results],
        }

    def show(self, console: Console) -> None:
        """Print a row for each fault, and the verdict in words."""
        rows = [_cells(result) for result in self.results]
        print_table(console, ("fault", "injected in", "check", "detected by", "seconds"), rows)
        console.print()
        for result in self.missed:
            paragraph(console, f"{result.fault.name}: {_reason(result)}")
        detected = sum(result.is_detected_as_named for result in self.results)
        count = f"{detected} of {len(self.results)} detected by a field that their entries name"
        paragraph(console, f"{count}; {figure(self.seconds, 0)} seconds.")


def _cells(result: FaultResult) -> tuple[str, ...]:
    fault = result.fault
    if result.first is not None and result.is_detected_as_named:
        by = result.first.field
    else:
        by = "NOT as named" if result.is_detected else "NOT detected"
    return fault.name, fault.code, fault.trial.check, by, f"{result.seconds:.1f}"


def _reason(result: FaultResult) -> str:
    if result.before:
        return f"its check also fails without the fault: {result.before[0]}."
    if not result.findings:
        return "the check finds nothing."
    return f"the check finds {result.first}; the entry names {' or '.join(result.fault.fields)}."


@check_arguments
def run_catalogue(
    names: Sequence[str] | None = None, *, device: str | None = None, jobs: JobCount = 2, progress: bool = False
) -> CatalogueResult:
    """Inject the named faults (None: all), and check each in a process of its own.

    jobs: number of processes at a time.
    """
    from specsim.core.engine_options import check_device
    from specsim.correctness.faults.catalogue import FAULTS

    require(names is None or len(names), "names", names, "at least one fault, or None for all of them")
    faults_by_name = {fault.name: fault for fault in FAULTS}
    for name in names or ():
        require(name in faults_by_name, "name", name, ", ".join(faults_by_name))
    device = check_device(device)
    date = now()
    start = time.perf_counter()
    faults = [faults_by_name[name] for name in (faults_by_name if names is None else names)]
    with closing(_results(faults, device, jobs)) as arriving:
        bar = tqdm(arriving, total=len(faults), unit="fault", disable=None if progress else True)
        results = {result.fault.name: result for result in bar}
    in_order = tuple(results[fault.name] for fault in faults)
    return CatalogueResult(in_order, device, time.perf_counter() - start, date, versions(device))


def _results(faults: Sequence[Fault], device: str, jobs: int) -> Generator[FaultResult]:
    """Yield results as they arrive; `jobs` processes share the trials of the unchanged package."""
    texts = {fault.name: changed(fault.edits) for fault in faults}  # a stale fault raises before anything runs
    faults_by_name = {fault.name: fault for fault in faults}
    keys_by_name = {fault.name: _key(fault.trial) for fault in faults}
    trials = {_key(fault.trial): fault.trial for fault in faults}
    shares = dict(enumerate(_shares(trials, jobs)))
    before: dict[str, TrialFindings] = {}
    checked: dict[str, TimedFindings] = {}
    with ProcessThreads(jobs) as threads:
        run = partial(_timed, device=device, watch=threads.watch)
        calls: dict[int | str, Callable[[], TimedFindings]] = {
            index: partial(run, {}, [trials[key] for key in keys]) for index, keys in shares.items()
        }
        calls |= {fault.name: partial(run, texts[fault.name], [fault.trial]) for fault in faults}
        for name, (seconds, findings) in finished(threads, calls, _work):
            if isinstance(name, int):
                before |= zip(shares[name], findings, strict=True)
            else:
                checked[name] = seconds, findings
            for fault in [faults_by_name[name] for name in checked if keys_by_name[name] in before]:
                seconds, (fault_findings,) = checked.pop(fault.name)
                yield FaultResult(fault, fault_findings, before[keys_by_name[fault.name]], seconds)


def _work(name: int | str) -> str:
    return "the checks without a fault" if isinstance(name, int) else f"fault {name}"


def _shares(trials: Mapping[str, Trial], jobs: int) -> Generator[list[str]]:
    """Split trials over processes: one share per job, and one for trials of interpreted kernels."""
    interpreted = [key for key, trial in trials.items() if trial.check in INTERPRETED]
    others = [key for key in trials if key not in interpreted]
    yield from filter(None, (*(others[first::jobs] for first in range(jobs)), interpreted))


def _key(trial: Trial) -> str:
    return json.dumps(asdict(trial))


def _timed(texts: dict[str, str], trials: Sequence[Trial], device: str, watch: ProcessWatch) -> TimedFindings:
    start = time.perf_counter()
    findings = _findings(texts, trials, device, watch)
    return time.perf_counter() - start, findings


def _findings(
    texts: dict[str, str], trials: Sequence[Trial], device: str, watch: ProcessWatch = lambda _: None
) -> list[TrialFindings]:
    """Run trials on a copy of the package with these sources, within SECONDS each.

    A process that crashes or does not end is a finding too. One that is killed from outside raises ProcessLost.
    """
    device = "cpu" if trials[0].check in INTERPRETED else device
    with copied_package(texts) as root:
        request = {"root": str(root), "device": device, "trials": [asdict(trial) for trial in trials]}
        try:
            words = child_words(root, "specsim.correctness.faults.trial")
            child = run_child(
                words, SECONDS * len(trials), json.dumps(request), watch, env=environment(root, device), cwd=root
            )
        except TimeoutExpired:
            expected = f"an end within {SECONDS:.0f} seconds"
            return [(FaultFinding("no end", "the process", expected, None),)] * len(trials)
    if child.status in KILLED:
        raise ProcessLost(f"process {child.pid}", describe_end(child.status))
    if child.status or not child.out:  # some code may end the process early, with any status
        last = (child.err.strip().splitlines() or [""])[-1]
        return [(FaultFinding("crash", "the process", "exit status 0", f"{child.status}: {last}"),)] * len(trials)
    return [tuple(FaultFinding(**fields) for fields in trial_findings) for trial_findings in json.loads(child.out)]
