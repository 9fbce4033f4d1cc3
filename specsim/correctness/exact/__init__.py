"""Certificates: the exact law of what a verifier lets through, and how far it is from the target's and the optimum."""

from specsim.correctness.exact.certificates import Certificate, Certificates, certify

__all__ = ["Certificate", "Certificates", "certify"]
