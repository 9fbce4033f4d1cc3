"""Drafters of random programs: the settings that each kind allows, and its solo runs."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache
from importlib import import_module

import torch

from specsim.core.config import SpecConfig
from specsim.core.pair import Pair, runs_on_host
from specsim.core.token_drafter import SuffixConfig
from specsim.correctness.differential.pairs import KINDS as PAIR_KINDS
from specsim.correctness.differential.pairs import TOKEN_DRAFTERS, make_pair
from specsim.correctness.invariance.replay import Proposals, Recorded, Replayed
from specsim.correctness.invariance.solo import SoloComparison, SoloRuns
from specsim.serving.requests import Request

SHARED = "suffix.shared"  # a suffix drafter with the tree of finished outputs
KINDS = (*PAIR_KINDS, SHARED)
_MODULES = 3  # of an MTP drafter of synthetic_pair
_STEPS = 5


def most_steps(kind: str) -> int:
    """Count the most drafts of one path."""
    return _MODULES if kind in ("mtp", "mtp.parallel") else _STEPS


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
    """Make the pair `kind-family`; its suffix drafter has no tree of other requests' outputs."""
    return make_pair(name.replace(SHARED, "suffix"), dtype)


def recorded(pair: Pair, impl: str, proposals: Proposals) -> Pair:
    """Give the pair a new suffix drafter with the shared tree, whose proposals are recorded."""
    suffix = import_module(f"specsim.{impl}.drafters.suffix").Suffix(SuffixConfig())
    return pair.with_drafter(Recorded(suffix, proposals))


def compare_shared(
    pair: Pair, config: SpecConfig, dtype: torch.dtype, requests: Collection[Request], proposals: Proposals
) -> SoloComparison:
    """Compare requests of suffix drafters with the shared tree with two solo runs each.

    All of a request equals a solo run with the same proposals. Greedy tokens and ends also equal those of a solo run
    with the drafter's own tree alone, whose rounds may differ; under `relaxed` penalties tokens depend on the tree.
    """
    replayed = SoloRuns(pair.with_drafter(Replayed(proposals)), config, dtype).compare(requests)
    greedy = [each for each in requests if each.params.temperature == 0 and config.penalties == "exact"]
    own = SoloRuns(pair, config, dtype, compared=("token_ids", "finish_reason")).compare(greedy)
    return replace(
        replayed,
        within_rounding_error=_united(replayed.within_rounding_error, own.within_rounding_error),
        differences=replayed.differences + own.differences,
        max_logprob_error=max(replayed.max_logprob_error, own.max_logprob_error),
    )


def _united(first: Iterable[int], second: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({*first, *second}))
