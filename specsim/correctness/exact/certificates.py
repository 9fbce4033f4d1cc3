"""Certificates of every verifier in every implementation, and of the controls."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from typing import Any

from tqdm.auto import tqdm

from specsim.core.arguments import check_arguments
from specsim.core.errors import require, require_choice
from specsim.core.provenance import now, versions
from specsim.core.verifiers import BY_DRAFTS, resolve
from specsim.correctness.exact import implementations
from specsim.correctness.exact.cases import CASES, INTERPRETED, LAUNCHED, ExactCase, cases_of
from specsim.correctness.exact.controls import CONTROLS
from specsim.correctness.exact.distribution import ExactDistribution, NotConstant, TooDeep, exact_distribution
from specsim.correctness.exact.optimum import optimum
from specsim.correctness.exact.report import Certificate, Certificates
from specsim.correctness.exact.verifier import Accepted, DraftedTree, Verifier, no_uniforms, unread
from specsim.serving.generation import kernel_device


def _greedy(drafted_tree: DraftedTree, _uniforms: Sequence[Any], _final: float) -> Accepted:
    from specsim.reference.acceptance import greedy

    return greedy(drafted_tree.tree, drafted_tree.prob_NV)


GREEDY = Verifier("greedy", "lossless", "best", no_uniforms, unread, _greedy)
VERIFIERS: tuple[Verifier, ...] = (
    GREEDY,
    *(resolve(place) for kind in BY_DRAFTS for place in kind.certificates),
)
NAMES = tuple(dict.fromkeys(verifier.family for verifier in VERIFIERS))
IMPLS = ("reference", "fast", "both")


@dataclass(frozen=True, slots=True)
class _Task:
    """A verifier on a case, ready to be certified."""

    verifier: str
    promise: str
    impl: str
    case: ExactCase
    enumerate: Callable[[], ExactDistribution]

    def certificate(self, most: Callable[[ExactCase], Fraction]) -> Certificate:
        """Enumerate the distribution and compute its figures; raises as exact_distribution does."""
        names = (self.verifier, self.promise, self.impl)
        return Certificate.of(names, self.case, self.enumerate(), most(self.case))


@check_arguments
def certify(
    verifier: str | None = None, *, impl: str = "reference", device: str | None = None, progress: bool = False
) -> Certificates:
    """Certify a verifier, or all of them and the controls. device: for the fast implementation."""
    if verifier is not None:
        require_choice("verifier", verifier, NAMES)
    require_choice("impl", impl, IMPLS)
    require(impl != "reference" or device in (None, "cpu"), "device", device, "cpu with impl 'reference'")
    kernels = "cpu" if impl == "reference" else kernel_device(device)
    date = now()
    start = time.perf_counter()
    chosen = [candidate for candidate in VERIFIERS if verifier in (None, candidate.family)]
    tasks = list(_tasks(chosen, impl, kernels))
    if verifier is None:
        tasks += [_Task(control.name, "wrong", "control", control.case, control.distribution) for control in CONTROLS]
    rows = []
    inconsistent = []
    most = cache(optimum)
    for task in tqdm(tasks, unit="certificate", disable=None if progress else True):
        try:
            rows.append(task.certificate(most))
        except (NotConstant, TooDeep) as error:
            inconsistent.append(f"{task.verifier} ({task.impl}) on {task.case.name}: {error}")
    table = _table(impl, kernels)
    drafts = {candidate.drafts for candidate in chosen}
    not_run = {case.name for kind in drafts for case in CASES[kind] if case not in table[kind]}
    seconds = time.perf_counter() - start
    return Certificates(tuple(rows), tuple(inconsistent), tuple(sorted(not_run)), seconds, date, versions(kernels))


def _tasks(chosen: list[Verifier], impl: str, device: str) -> Iterator[_Task]:
    for verifier in chosen:
        for name in ("reference", "fast") if impl == "both" else (impl,):
            run = implementations.fast(verifier, device) if name == "fast" else implementations.reference(verifier)
            for case in cases_of(_table(name, device), verifier.drafts, verifier.name == "greedy"):
                enumerate_case = partial(exact_distribution, verifier, case, run)
                yield _Task(verifier.name, verifier.promise, name, case, enumerate_case)


def _table(impl: str, device: str) -> dict[str, tuple[ExactCase, ...]]:
    return CASES if impl == "reference" else LAUNCHED if device == "cuda" else INTERPRETED
