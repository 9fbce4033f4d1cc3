"""Ledger of papers: published figures, and those that the package computes, in papers/ledger.md.

`python -m papers.reproduction` computes every figure that takes seconds on a CPU. Published figures stand in
papers/NAME/published.toml, with their sources and the functions of this package that reproduce them.
"""
