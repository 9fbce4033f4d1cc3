"""Conformance cases of the contract's operations, for any kernels; README.md describes them."""
