"""Drafters of random programs: the settings that each kind allows."""

from functools import cache

import torch

from specsim.core.config import SpecConfig
from specsim.core.kinds import TESTED, DrafterKind
from specsim.core.pair import Pair
from specsim.core.token_drafter import SuffixConfig
from specsim.core.verifiers import DEFAULT_VERIFIER, VERIFIER_KINDS
from specsim.correctness.differential.drafter_grid import LATENT
from specsim.correctness.differential.pairs import KINDS as PAIR_KINDS
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.differential.setting import KV_FORMATS, LATER_FAMILIES

SHARED = "suffix.shared"  # a suffix drafter with the tree of finished outputs
KINDS = (*PAIR_KINDS, SHARED)
EARLIER_FAMILIES = ("llama", "qwen3", "mistral", "noisy")
_STEPS = 5


def _record(kind: str) -> DrafterKind:
    return TESTED["suffix" if kind == SHARED else kind]


def most_steps(kind: str) -> int:
    """Count the most drafts of one path; several modules make one each."""
    drafter = pair_of(f"{kind}-{EARLIER_FAMILIES[0]}", torch.float64).checkpoint
    num_modules = getattr(drafter and drafter.config, "num_modules", 1)
    return num_modules if num_modules > 1 else _STEPS


def families(kind: str) -> tuple[str, ...]:
    """List the families of targets that this kind drafts for."""
    every = (*EARLIER_FAMILIES, *LATER_FAMILIES)
    return tuple(family for family in every if family not in LATENT) if _record(kind).kv == "target" else every


def formats(kind: str) -> tuple[str, ...]:
    """List the number formats of KV, by name; a kind without KV of its own has the target's only."""
    return tuple(KV_FORMATS) if _record(kind).kv == "own" else ("model", "fp8_target")


def verifiers(kind: str, topk: int) -> tuple[str, ...]:
    """List the verifiers other than the default one that this kind's drafts allow."""
    drafts = ("best", "sampled" if topk == 1 else "siblings") if _record(kind).can_sample else ("best",)
    return tuple(
        verifier.name for verifier in VERIFIER_KINDS if verifier.drafts in drafts and verifier.name != DEFAULT_VERIFIER
    )


def possible_graph(graph: str, kind: str, config: SpecConfig) -> str:
    """Return the graph mode, or `phase` where no single graph holds the whole round."""
    is_on_host = not config.is_plain and _record(kind).drafts_on_host(config.topk)
    return "phase" if graph == "round" and (config.release == "round" or is_on_host) else graph


@cache
def pair_of(name: str, dtype: torch.dtype) -> Pair:
    """Make the pair `kind-family`; only SHARED has a tree of other requests' outputs."""
    pair = make_pair(name.replace(SHARED, "suffix"), dtype)
    return pair.with_drafter(SuffixConfig()) if name.startswith(SHARED) else pair
