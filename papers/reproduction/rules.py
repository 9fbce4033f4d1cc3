"""Exact figures of acceptance rules on the cases of the certificates."""

from functools import cache
from pathlib import Path

from specsim.core.rule import AcceptanceRule
from specsim.correctness.exact import implementations, load_rules
from specsim.correctness.exact.cases import CASES, CUT_CHAIN, ONE, RULE_CASES, ExactCase
from specsim.correctness.exact.certificates import VERIFIERS
from specsim.correctness.exact.distribution import ExactDistribution, exact_distribution
from specsim.correctness.exact.optimum import optimum
from specsim.correctness.exact.rule_distribution import rule_distribution
from specsim.correctness.exact.verifier import Verifier

K_SEQ = Path(__file__).resolve().parents[2] / "notebooks" / "examples" / "my_rule.py"


def distance(verifier: str) -> float:
    """Compute the largest total variation of a verifier from the target's distribution, over its cases."""
    return float(max(_distribution(verifier, case).total_variation(case) for case in _cases(verifier)))


def accepted(verifier: str, case: str) -> float:
    """Compute the expected accepted drafts of a verifier on a case."""
    return float(_distribution(verifier, _case(verifier, case)).accepted)


def share_of_optimum(verifier: str, case: str) -> float:
    """Compute the accepted drafts of a verifier over the most that a lossless rule accepts on the case."""
    exact_case = _case(verifier, case)
    return float(_distribution(verifier, exact_case).accepted / optimum(exact_case))


def least_ratio(verifier: str, other: str) -> float:
    """Compute the accepted drafts of a verifier over those of another one: the least over its cases."""
    pairs = ((_distribution(name, case).accepted for name in (verifier, other)) for case in _cases(verifier))
    return float(min(first / second for first, second in pairs))


def k_seq_share(siblings: int) -> float:
    """Compute the smallest share of the optimum that K-SEQ accepts, over cases of this many siblings of the root."""
    cases = [case for case in RULE_CASES["siblings"] if case.parents == (-1, *[0] * siblings)]
    most = {case: optimum(case) for case in cases}
    return min(float(rule_distribution(_k_seq(), case).exact.accepted / most[case]) for case in cases if most[case])


def k_seq_distance() -> float:
    """Compute the largest total variation of K-SEQ from the target's distribution, over the cases of siblings."""
    cases = CASES["siblings"]
    return float(max(rule_distribution(_k_seq(), case).exact.total_variation(case) for case in cases))


def agreement_over_bound() -> float:
    """Compute P(agree) of two samples with the same Gumbel noise over (1 - TV) / (1 + TV): the least of two cases."""
    shares = []
    coupled = next(verifier for verifier in VERIFIERS if verifier.is_coupled)
    for case in (ONE, CUT_CHAIN):
        pairs = zip(case.target(()), case.draft(()), strict=True)
        variation = sum(abs(target - draft) for target, draft in pairs) / 2
        shares.append(_distribution(coupled.name, case).accepted * (1 + variation) / (1 - variation))
    return float(min(shares))


@cache
def _k_seq() -> AcceptanceRule:
    (rule,) = load_rules(f"{K_SEQ}:rule")
    return rule


def _verifier(name: str) -> Verifier:
    (verifier,) = (verifier for verifier in VERIFIERS if verifier.name == name)
    return verifier


def _cases(verifier: str) -> tuple[ExactCase, ...]:
    return CASES[_verifier(verifier).drafts]


def _case(verifier: str, name: str) -> ExactCase:
    (exact_case,) = (case for case in _cases(verifier) if case.name == name)
    return exact_case


@cache
def _distribution(verifier: str, case: ExactCase) -> ExactDistribution:
    exact_verifier = _verifier(verifier)
    return exact_distribution(exact_verifier, case, implementations.reference(exact_verifier))
