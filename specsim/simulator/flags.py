"""Options of engines' servers for a cell and a setting."""

import json
import shlex
from typing import Any

from specsim.core.config import SpecConfig
from specsim.core.errors import require
from specsim.core.kinds import KINDS, SERVED
from specsim.simulator.candidates import has_latent_attention, takes_trees
from specsim.simulator.cell import Cell
from specsim.simulator.model import read_config

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
