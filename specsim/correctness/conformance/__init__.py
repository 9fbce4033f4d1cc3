"""Cases of the contract's operations that any kernels can be run against; README.md is their page."""
