"""The reference implementation: one speculative round in plain PyTorch, written to be checked by reading."""
