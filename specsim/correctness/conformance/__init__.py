"""The operations of conformance.contract as cases that anyone's kernels can be run against; README.md is their page."""
