"""Speculation settings that a plan tries, and the limits of the tried range."""

from collections.abc import Sequence

from specsim.core.config import SpecConfig
from specsim.core.kinds import KINDS
from specsim.simulator.cell import Cell
from specsim.simulator.model import read_config

TREES = ((2, 2), (2, 3), (2, 5), (3, 4), (4, 3), (4, 5), (8, 3), (8, 5))  # topk and num_steps
# Drafters over whose drafts no released engine builds trees.
CHAINS_ONLY = tuple(name for name, kind in KINDS.items() if kind.is_parallel)
SIZES = (4, 8, 16, 32, 64)  # num_draft_tokens


def candidates(cell: Cell) -> list[SpecConfig]:
    """List plain decoding, every chain, and trees, no wider and no deeper than the shares."""
    depth = len(cell.shares)
    width = min(map(len, cell.shares)) if takes_trees(cell) else 1
    page = cell.page_size
    chains = [SpecConfig(1, steps, steps + 1, page) for steps in range(1, depth + 1)]
    trees = [
        SpecConfig(topk, steps, size, page)
        for topk, steps in TREES
        for size in SIZES
        if topk <= width and steps <= depth and steps + 1 < size <= topk + (steps - 1) * topk**2 + 1
    ]
    return [SpecConfig.plain(page), *chains, *trees]


def takes_trees(cell: Cell) -> bool:
    """Whether an engine takes trees."""
    return not why_no_trees(cell)


def why_no_trees(cell: Cell) -> str:
    """Say why no engine takes trees; empty where one does."""
    if cell.drafter in CHAINS_ONLY:
        return "no released engine builds them over parallel drafts"
    if cell.page_size > 1 and has_latent_attention(cell):
        return "engines take them for latent attention with --page-size 1 only"
    return ""


def has_latent_attention(cell: Cell) -> bool:
    """Whether the model's attention reads one latent vector per token (MLA)."""
    config = read_config(cell.model)[1]
    return bool(config.get("text_config", config).get("kv_lora_rank"))


def limits_reached(config: SpecConfig, tried: Sequence[SpecConfig]) -> dict[str, int]:
    """Find the fields of a setting, with values, that no tried setting of its kind exceeds: more might be better.

    Chains are compared with chains, and trees with trees.
    """
    if config.is_plain:
        return {}
    same = [each for each in tried if (each.topk == 1) == (config.topk == 1)]
    names = ("num_steps",) if config.topk == 1 else ("topk", "num_steps", "num_draft_tokens")
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value == max(getattr(each, name) for each in same)}
