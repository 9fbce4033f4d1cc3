"""Options of engines' servers for a cell and a setting."""

import json
import shlex
from typing import Any

from specsim.core.config import SpecConfig
from specsim.core.errors import require
from specsim.simulator.candidates import has_latent_attention, takes_trees
from specsim.simulator.cell import Cell
from specsim.simulator.drafter import BLOCKS
from specsim.simulator.model import read_config

# By kind. A DSpark head's own block decides how much it drafts (lm-sys/lm-sys.github.io#413).
_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "EAGLE", "dflash": "DFLASH", "dspark": "DSPARK"}


def sglang_flags(cell: Cell, config: SpecConfig, draft: str = "DRAFT_MODEL") -> str | None:
    """Make the options of `python -m sglang.launch_server`.

    None: SGLang has no such drafter, as P-EAGLE (sgl-project/sglang#23171).
    """
    flags = [f"--tp-size {cell.tensor_parallel}", f"--page-size {config.page_size}"]
    if not config.is_plain:
        if cell.drafter not in _ALGORITHMS:
            return None
        flags = [*_sglang_drafts(cell, config, draft), *flags]
    if config.topk > 1:
        flags.append(f"--attention-backend {_tree_backend(cell)}")
    return " ".join(flags)


def _sglang_drafts(cell: Cell, config: SpecConfig, draft: str) -> list[str]:
    head = "" if cell.drafter == "mtp" else f" --speculative-draft-model-path {shlex.quote(draft)}"
    flags = [f"--speculative-algorithm {_ALGORITHMS[cell.drafter]}{head}"]
    if cell.drafter in BLOCKS:
        require(config.topk == 1, "topk", config.topk, f"1: SGLang drafts chains with {cell.drafter}")
    else:
        flags += [f"--speculative-num-steps {config.num_steps}", f"--speculative-eagle-topk {config.topk}"]
    if cell.drafter != "dspark":
        flags.append(f"--speculative-num-draft-tokens {config.num_draft_tokens}")
    return flags


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
        settings: dict[str, Any] = {"method": cell.drafter, "model": draft, "num_speculative_tokens": config.num_steps}
        if cell.drafter == "p-eagle":
            settings |= {"method": "eagle3", "parallel_drafting": True}
        if cell.drafter == "mtp":
            settings.pop("model")
        flags = [f"--speculative-config {shlex.quote(json.dumps(settings))}", *flags]
    return " ".join(flags)
