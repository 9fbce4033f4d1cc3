"""Options of engines' servers for a cell and a setting."""

import json
import shlex

from specsim.core.config import SpecConfig
from specsim.core.errors import require
from specsim.simulator.candidates import has_latent_attention, takes_trees
from specsim.simulator.cell import Cell
from specsim.simulator.model import read_config


def sglang_flags(cell: Cell, config: SpecConfig, draft: str = "DRAFT_MODEL") -> str:
    """Make the options of `python -m sglang.launch_server`."""
    flags = [f"--tp-size {cell.tensor_parallel}", f"--page-size {config.page_size}"]
    if not config.is_plain:
        head = "" if cell.drafter == "mtp" else f" --speculative-draft-model-path {shlex.quote(draft)}"
        flags = [
            f"--speculative-algorithm {'EAGLE3' if cell.drafter == 'eagle3' else 'EAGLE'}{head}",
            f"--speculative-num-steps {config.num_steps}",
            f"--speculative-eagle-topk {config.topk}",
            f"--speculative-num-draft-tokens {config.num_draft_tokens}",
            *flags,
        ]
    if config.topk > 1:
        flags.append(f"--attention-backend {_tree_backend(cell)}")
    return " ".join(flags)


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
        settings = {"method": cell.drafter, "model": draft, "num_speculative_tokens": config.num_steps}
        if cell.drafter == "mtp":
            settings.pop("model")
        flags = [f"--speculative-config {shlex.quote(json.dumps(settings))}", *flags]
    return " ".join(flags)
