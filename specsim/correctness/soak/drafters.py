"""Drafters of random programs: the settings that each kind allows."""

from functools import cache

import torch

from specsim.core.config import SpecConfig
from specsim.core.pair import Pair, runs_on_host
from specsim.core.token_drafter import SuffixConfig
from specsim.correctness.differential.drafter_grid import LATENT, LATER_FAMILIES, WITHOUT_KV
from specsim.correctness.differential.pairs import KINDS as PAIR_KINDS
from specsim.correctness.differential.pairs import TOKEN_DRAFTERS, make_pair
from specsim.correctness.differential.setting import KV_FORMATS

SHARED = "suffix.shared"  # a suffix drafter with the tree of finished outputs
KINDS = (*PAIR_KINDS, SHARED)
EARLIER_FAMILIES = ("llama", "qwen3", "mistral", "noisy")
_MODULES = 3  # of an MTP drafter of synthetic_pair
_STEPS = 5


def most_steps(kind: str) -> int:
    """Count the most drafts of one path."""
    return _MODULES if kind in ("mtp", "mtp.parallel") else _STEPS


def families(kind: str) -> tuple[str, ...]:
    """List the families of targets that this kind drafts for."""
    every = (*EARLIER_FAMILIES, *LATER_FAMILIES)
    return tuple(family for family in every if family not in LATENT) if kind.startswith("frozen-kv") else every


def formats(kind: str) -> tuple[str, ...]:
    """List the number formats of KV, by name; a kind without KV of its own has the target's only."""
    has_none = kind == SHARED or kind.startswith(WITHOUT_KV)
    return ("model", "fp8_target") if has_none else tuple(KV_FORMATS)


def verifiers(kind: str, topk: int) -> tuple[str, ...]:
    """List the verifiers other than target_only that this kind's drafts allow."""
    if kind in TOKEN_DRAFTERS or kind == SHARED:
        return ("typical",)
    return ("typical", "rejection", "block", "gumbel") if topk == 1 else ("typical", "multi_round")


def possible_graph(graph: str, kind: str, config: SpecConfig) -> str:
    """Return the graph mode, or `phase` where no single graph holds the whole round."""
    token_drafter = SuffixConfig() if kind == SHARED else TOKEN_DRAFTERS.get(kind)
    is_split = config.release == "round" or runs_on_host(token_drafter, config)
    return "phase" if graph == "round" and is_split else graph


@cache
def pair_of(name: str, dtype: torch.dtype) -> Pair:
    """Make the pair `kind-family`; only SHARED has a tree of other requests' outputs."""
    pair = make_pair(name.replace(SHARED, "suffix"), dtype)
    return pair.with_drafter(SuffixConfig()) if name.startswith(SHARED) else pair
