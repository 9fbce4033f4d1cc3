"""Verifiers: one record for each, from which both implementations, the checks and the commands take what they need."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, get_args

Verifier = Literal["target_only", "typical", "rejection", "block", "multi_round", "traversal", "recursive", "gumbel"]
# Drafts that are verified. `best`: a tree of the drafter's best tokens. `sampled`: a chain, each draft drawn from the
# drafter's distribution. `siblings`: K chains below the root, drawn independently; siblings may be equal. `distinct`:
# the same chains, but the root's children are drawn without replacement.
Drafts = Literal["best", "sampled", "siblings", "distinct"]
DRAFTS: tuple[Drafts, ...] = get_args(Drafts)
LANES: tuple[Drafts, ...] = ("siblings", "distinct")  # K chains below the root, all of them verified
# Random numbers that decide about drafts: a uniform for each depth or each node, the noise that drew the drafts, none.
Draws = Literal["depth", "node", "noise", "none"]


@cache
def _imported(module: str) -> ModuleType:
    return import_module(module)


def resolve(path: str) -> Any:
    """Import the object of a record, named as MODULE:NAME."""
    if not path:
        raise ValueError("a record lacks the place that is read here; see DrafterKind and VerifierKind in specsim.core")
    module, _, name = path.partition(":")
    return getattr(_imported(module), name)  # not cached: checks put wrong functions in its place


@dataclass(frozen=True, slots=True)
class VerifierKind:
    """A verifier; places of code are MODULE:NAME, for `resolve`."""

    name: Verifier
    drafts: Drafts
    draws: Draws
    reference: str  # function of one tree: p, then q where `reads_draft_prob`, draws, final uniform, thresholds
    fast: str  # launcher of kernels for a fast.acceptance.Verification
    oracle: str  # function of the oracle's drafts and a setting
    decisions: str  # function of an explorer.decisions.Walk
    certificates: tuple[str, ...]  # values of exact.verifier.Verifier, one for each set of thresholds
    reads_draft_prob: bool = False
    thresholds: tuple[str, ...] = ()  # fields of SpecConfig, in the order of the reference's arguments
    is_lossless: bool = True  # with thresholds of 1

    @property
    def places(self) -> tuple[str, ...]:
        """Places of all its code."""
        return (self.reference, self.fast, self.oracle, self.decisions, *self.certificates)

    @property
    def has_lanes(self) -> bool:
        """Check whether drafts are K chains below the root, all of which are verified."""
        return self.drafts in LANES

    @property
    def is_coupled(self) -> bool:
        """Check whether drafts are drawn with noise that the target shares, rather than with uniforms."""
        return self.draws == "noise"


VERIFIER_KINDS: tuple[VerifierKind, ...] = (
    VerifierKind(
        name="target_only",
        drafts="best",
        draws="depth",
        reference="specsim.reference.acceptance:target_only",
        fast="specsim.fast.verifiers.target_only:accept",
        oracle="specsim.reference.oracle_verify:target_only",
        decisions="specsim.explorer.decisions:target_only",
        certificates=(
            "specsim.correctness.exact.breakpoints:TARGET_ONLY",
            "specsim.correctness.exact.breakpoints:HALF_ACC",
            "specsim.correctness.exact.breakpoints:HALF_SINGLE",
        ),
        thresholds=("threshold_single", "threshold_acc"),
    ),
    VerifierKind(
        name="typical",
        drafts="best",
        draws="none",
        reference="specsim.reference.acceptance:typical",
        fast="specsim.fast.verifiers.typical:accept",
        oracle="specsim.reference.oracle_verify:typical",
        decisions="specsim.explorer.decisions:typical",
        certificates=(
            "specsim.correctness.exact.breakpoints:TYPICAL",
            "specsim.correctness.exact.breakpoints:TYPICAL_DELTA",
            "specsim.correctness.exact.breakpoints:TYPICAL_EPSILON",
        ),
        thresholds=("typical_epsilon", "typical_delta"),
        is_lossless=False,
    ),
    VerifierKind(
        name="rejection",
        drafts="sampled",
        draws="depth",
        reference="specsim.reference.acceptance:rejection",
        fast="specsim.fast.verifiers.rejection:accept",
        oracle="specsim.reference.oracle_verify:multi_round",  # of one sibling
        decisions="specsim.explorer.decisions:rejection",
        certificates=("specsim.correctness.exact.breakpoints:REJECTION",),
        reads_draft_prob=True,
    ),
    VerifierKind(
        name="block",
        drafts="sampled",
        draws="depth",
        reference="specsim.reference.acceptance:block",
        fast="specsim.fast.verifiers.traversal:accept",  # of one lane
        oracle="specsim.reference.oracle_verify:block",
        decisions="specsim.explorer.decisions:block",
        certificates=("specsim.correctness.exact.breakpoints:BLOCK",),
        reads_draft_prob=True,
    ),
    VerifierKind(
        name="multi_round",
        drafts="siblings",
        draws="node",
        reference="specsim.reference.acceptance:multi_round",
        fast="specsim.fast.verifiers.multi_round:accept",
        oracle="specsim.reference.oracle_verify:multi_round",
        decisions="specsim.explorer.decisions:multi_round",
        certificates=("specsim.correctness.exact.breakpoints:MULTI_ROUND",),
        reads_draft_prob=True,
    ),
    VerifierKind(
        name="traversal",
        drafts="siblings",
        draws="node",
        reference="specsim.reference.acceptance:traversal",
        fast="specsim.fast.verifiers.traversal:accept",
        oracle="specsim.reference.oracle_verify:traversal",
        decisions="specsim.explorer.decisions:traversal",
        certificates=("specsim.correctness.exact.breakpoints:TRAVERSAL",),
        reads_draft_prob=True,
    ),
    VerifierKind(
        name="recursive",
        drafts="distinct",
        draws="node",
        reference="specsim.reference.acceptance:recursive",
        fast="specsim.fast.verifiers.multi_round:accept",
        oracle="specsim.reference.oracle_verify:recursive",
        decisions="specsim.explorer.decisions:multi_round",
        certificates=("specsim.correctness.exact.breakpoints:RECURSIVE",),
        reads_draft_prob=True,
    ),
    VerifierKind(
        name="gumbel",
        drafts="sampled",
        draws="noise",
        reference="specsim.reference.acceptance:gumbel",
        fast="specsim.fast.verifiers.gumbel:accept",
        oracle="specsim.reference.oracle_verify:gumbel",
        decisions="specsim.explorer.decisions:gumbel",
        certificates=("specsim.correctness.exact.race:GUMBEL",),
    ),
)
KIND_OF: dict[str, VerifierKind] = {kind.name: kind for kind in VERIFIER_KINDS}
BY_DRAFTS = sorted(VERIFIER_KINDS, key=lambda kind: DRAFTS.index(kind.drafts))
VERIFIERS: tuple[Verifier, ...] = tuple(kind.name for kind in VERIFIER_KINDS)
DEFAULT_VERIFIER: Verifier = "target_only"  # of a setting, and of plain decoding
# The verifier whose drafts and uniforms a rule of a user gets, the first of those drafts.
VERIFIER_OF: dict[Drafts, Verifier] = {kind.drafts: kind.name for kind in reversed(VERIFIER_KINDS)}


def one_of(kinds: Iterable[VerifierKind]) -> str:
    """List the names of verifiers in words: a, b or c."""
    *names, last = (kind.name for kind in kinds)
    return f"{', '.join(names)} or {last}" if names else last
