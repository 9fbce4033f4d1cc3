"""The verify tree: the selection of its candidates, its nodes, its construction from them, and its masks."""

from specsim.fast.tree.construction import build, empty_tree, proposed
from specsim.fast.tree.malformed import MalformedTree, check
from specsim.fast.tree.masks import bitpacked_mask, full_mask
from specsim.fast.tree.nodes import select

__all__ = ["MalformedTree", "bitpacked_mask", "build", "check", "empty_tree", "full_mask", "proposed", "select"]
