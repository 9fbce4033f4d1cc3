"""Verifiers: each accepts a path of every tree, in kernels above their launcher."""
