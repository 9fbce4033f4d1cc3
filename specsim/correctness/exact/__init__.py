"""Certificates: the exact distribution of a verifier's tokens, its distance from the target's, and the optimum."""

from specsim.correctness.exact.certificates import certify
from specsim.correctness.exact.report import Certificate, Certificates

__all__ = ["Certificate", "Certificates", "certify"]
