"""Certificates: the exact distribution of a verifier's tokens, its distance from the target's, and the optimum."""

from specsim.correctness.exact.certificates import certify
from specsim.correctness.exact.report import Certificate, Certificates
from specsim.correctness.exact.rule_distribution import certify_rules, load_rules

__all__ = ["Certificate", "Certificates", "certify", "certify_rules", "load_rules"]
