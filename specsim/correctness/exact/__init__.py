"""Certificates: the exact distribution of a verifier's tokens, its distance from the target's, and the optimum."""

from specsim.correctness.exact.certificates import Certificate, Certificates, certify

__all__ = ["Certificate", "Certificates", "certify"]
