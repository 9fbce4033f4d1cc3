"""Ledger of papers: each published figure beside the one that the package computes, written to papers/ledger.md.

`python -m specsim.maintain.papers` computes every figure that takes seconds on a CPU. Published figures stand in
papers/NAME/published.toml, with their sources and the functions of this package that reproduce them.
"""
