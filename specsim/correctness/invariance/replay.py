"""Proposals of a token drafter, recorded while requests share it and replayed when one of them runs solo.

A drafter with a tree of other requests' outputs proposes other drafts in a solo run. Given the recorded proposals, a
solo run has the same trees, so its rounds and sampled tokens can be compared too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import tee
from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.kinds import OWN
from specsim.core.pair import Pair, record_of
from specsim.core.settings import Settings
from specsim.core.token_drafter import Proposal, SuffixConfig, TokenDrafter, TreeLimits
from specsim.correctness.invariance.solo import SoloComparison, SoloRuns
from specsim.serving.requests import Request

Proposals = dict[tuple[int, tuple[int, ...]], Proposal]  # by request id and the tokens up to the root


class RecordingDrafter:
    """A token drafter that keeps every proposal of another one."""

    def __init__(self, drafter: TokenDrafter, proposals: Proposals) -> None:
        self._drafter = drafter
        self._proposals = proposals

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        proposal = self._drafter.propose(request_id, tokens, limits)
        self._proposals[request_id, tuple(tokens)] = proposal
        return proposal

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        self._drafter.finish(request_id, tokens, prompt_len)


class ReplayingDrafter:
    """A token drafter that repeats recorded proposals, and has none after tokens that were not recorded."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        return self._proposals.get((request_id, tuple(tokens)), Proposal([], [], []))

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        pass


def may_share_drafts(pair: Pair) -> bool:
    """Check whether the drafts of a request may depend on other requests.

    They do with a tree of finished outputs, and may with a drafter of a user's own.
    """
    drafter = pair.lookup or pair.drafter
    return drafter is not None and (record_of(drafter) is OWN or getattr(drafter, "shared", False))


def recorded(pair: Pair, impl: str, proposals: Proposals) -> Pair:
    """Make the pair with a token drafter whose proposals are recorded; a suffix drafter is a new one."""
    drafter: Any = pair.lookup or pair.drafter
    if isinstance(drafter, SuffixConfig):
        drafter = import_module(f"specsim.{impl}.drafters.suffix").Suffix(drafter)
    return _with_token_drafter(pair, RecordingDrafter(drafter, proposals))


def _with_token_drafter(pair: Pair, drafter: TokenDrafter) -> Pair:
    """Exchange the drafter of tokens, which drafts alone or next to one with weights."""
    return pair.with_drafter(drafter) if pair.lookup is None else replace(pair, lookup=drafter)


@dataclass(slots=True)
class ReplayedRuns:
    """Two solo runs of each request of a drafter whose drafts may depend on other requests.

    All of a request equals a solo run with the same proposals. Greedy tokens and ends also equal those of a solo run
    with the drafter's own proposals, whose rounds may differ; under `relaxed` penalties tokens depend on the tree.
    """

    pair: Pair
    config: SpecConfig
    dtype: torch.dtype  # of the batched runs
    proposals: Proposals  # of the batched run
    options: EngineOptions | None = None  # of the solo runs; None: the reference in float64
    settings: Settings | None = None  # of batched runs that switched
    num_solo: int = 0  # number of solo runs so far
    _drafting_runs: SoloRuns = field(init=False)  # with the drafter's own proposals

    def __post_init__(self) -> None:
        compared = ("token_ids", "finish_reason")
        self._drafting_runs = SoloRuns(self.pair, self.config, self.dtype, self.options, compared)

    def compare(self, requests: Iterable[Request]) -> SoloComparison:
        """Compare every request with its solo runs."""
        first, second = tee(requests)
        pair = _with_token_drafter(self.pair, ReplayingDrafter(self.proposals))
        replaying = SoloRuns(pair, self.config, self.dtype, self.options, settings=self.settings)
        replayed = replaying.compare(first)
        greedy = [request for request in second if request.params.temperature == 0 and self.config.penalties == "exact"]
        before = self._drafting_runs.num_solo
        drafting = self._drafting_runs.compare(greedy)
        self.num_solo += replaying.num_solo + self._drafting_runs.num_solo - before
        return replace(
            replayed,
            within_rounding_error=tuple(sorted({*replayed.within_rounding_error, *drafting.within_rounding_error})),
            differences=replayed.differences + drafting.differences,
            max_logprob_error=max(replayed.max_logprob_error, drafting.max_logprob_error),
        )
