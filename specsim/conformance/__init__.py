"""The operations of specsim.contract as cases that anyone's kernels can be run against; README.md is their page."""
