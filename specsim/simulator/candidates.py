"""Speculation settings that a plan tries, the limits of the tried range, and their options of engines' servers."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from specsim.core.config import SpecConfig
from specsim.core.errors import require
from specsim.core.kinds import KINDS, SERVED
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
    same = [setting for setting in tried if (setting.topk == 1) == (config.topk == 1)]
    names = ("num_steps",) if config.topk == 1 else ("topk", "num_steps", "num_draft_tokens")
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value == max(getattr(setting, name) for setting in same)}


_SGLANG_SIZES = {"num_steps": "num-steps", "topk": "eagle-topk", "num_draft_tokens": "num-draft-tokens"}


def sglang_flags(cell: Cell, config: SpecConfig, draft: str = "DRAFT_MODEL") -> str | None:
    """Make the options of `python -m sglang.launch_server`.

    None: SGLang has no such drafter.
    """
    flags = [f"--tp-size {cell.tensor_parallel}", f"--page-size {config.page_size}"]
    if not config.is_plain:
        if SERVED[cell.drafter].sglang is None:
            return None
        flags = [*_sglang_drafts(cell, config, draft), *flags]
    if config.topk > 1:
        flags.append(f"--attention-backend {_tree_backend(cell)}")
    return " ".join(flags)


def _sglang_drafts(cell: Cell, config: SpecConfig, draft: str) -> list[str]:
    served = SERVED[cell.drafter]
    head = "" if KINDS[cell.drafter].in_target else f" --speculative-draft-model-path {shlex.quote(draft)}"
    if "topk" not in served.sglang_sizes:
        require(config.topk == 1, "topk", config.topk, f"1: SGLang drafts chains with {cell.drafter}")
    sizes = [f"--speculative-{_SGLANG_SIZES[name]} {getattr(config, name)}" for name in served.sglang_sizes]
    return [f"--speculative-algorithm {served.sglang}{head}", *sizes]


def _tree_backend(cell: Cell) -> str:
    """Name an attention backend that takes trees, which the default one may refuse.

    With pages of more than one token every release since sglang#9784 takes flashinfer, newer ones triton and fa3, too.
    flashinfer has no attention sinks (GPT-OSS) and no trees for latent attention.
    """
    require(takes_trees(cell), "page_size", cell.page_size, "1, for trees with latent attention")
    has_sinks = read_config(cell.model)[1].get("model_type") == "gpt_oss"
    return "triton" if has_sinks or has_latent_attention(cell) else "flashinfer"


def vllm_flags(cell: Cell, config: SpecConfig, draft: str = "DRAFT_MODEL") -> str:
    """Make the options of `vllm serve`, which drafts chains."""
    flags = [f"--tensor-parallel-size {cell.tensor_parallel}", f"--block-size {config.page_size}"]
    require(config.topk == 1, "topk", config.topk, "1: vLLM drafts chains")
    if not config.is_plain:
        settings: dict[str, Any] = {"method": None, "model": draft, "num_speculative_tokens": config.num_steps}
        settings |= SERVED[cell.drafter].vllm
        if KINDS[cell.drafter].in_target:
            settings.pop("model")
        flags = [f"--speculative-config {shlex.quote(json.dumps(settings))}", *flags]
    return " ".join(flags)
