"""Mutants that are the same program, by their keys, and why: no test could see them."""

EQUIVALENT: dict[str, str] = {}
