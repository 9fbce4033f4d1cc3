"""Controls that the tests must reject: a lossy verifier, and reference engines with one injected error.

Each control replaces one function of the reference while its test runs, and only there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict
from specsim.core.pool import KVPool
from specsim.core.uniforms import accept_uniforms, draft_uniforms, final_uniforms
from specsim.core.verifiers import DEFAULT_VERIFIER, KIND_OF, VERIFIER_KINDS, VERIFIER_OF
from specsim.correctness.statistics.settings import CONFIGS
from specsim.correctness.wrong_rules import at_least

_REFERENCE = "specsim.reference"
# The first of four lanes, whose KV already lies in the path's place, is seldom the accepted one.
_LANES = SpecConfig(topk=4, num_steps=2, num_draft_tokens=9, page_size=4, verifier=VERIFIER_OF["siblings"])


@dataclass(frozen=True, slots=True)
class WrongEngine:
    """A wrong engine."""

    name: str
    config: SpecConfig
    replaced: str | None = None  # function of the reference; None where the config itself is wrong
    wrong: Callable[..., Any] | None = None  # function in its place
    tokens: int = 2304  # enough for it to be rejected
    kind: str = "eagle"  # of drafter

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Give the reference the error within a context."""
        if self.replaced is None:
            yield
            return
        with patch(self.replaced, self.wrong):
            yield


def _final_uniforms_of_no_round(seeds: Tensor, request_ids: Tensor, root_lens: Tensor) -> Tensor:
    """Return the same uniform for every bonus token of a request."""
    return final_uniforms(seeds, request_ids, torch.zeros_like(root_lens))


def _draft_uniforms_of_no_round(
    seeds: Tensor, request_ids: Tensor, root_lens: Tensor, depth: int, num_lanes: int
) -> Tensor:
    """Return the same uniforms for the drafts of every round."""
    return draft_uniforms(seeds, request_ids, torch.zeros_like(root_lens), depth, num_lanes)


def _final_uniforms_of_the_draft(seeds: Tensor, request_ids: Tensor, root_lens: Tensor) -> Tensor:
    """Draw the bonus token with the uniform of the round's first draft."""
    return draft_uniforms(seeds, request_ids, root_lens, 0, 1)[:, 0]


def _no_residual(prob_V: Tensor, _draft_prob_V: Tensor) -> Tensor:
    """Return the target's own distribution after a rejection, as if nothing had been rejected."""
    return prob_V


def _no_commit(_batch: Batch, _locations: Tensor, _verdict: Verdict, _pools: KVPool) -> None:
    """Leave the accepted path's KV where the tree wrote it."""


def _draft_uniforms_of_accept(
    seeds: Tensor, request_ids: Tensor, root_lens: Tensor, depth: int, num_lanes: int
) -> Tensor:
    """Draw drafts with the uniforms that accept them."""
    return accept_uniforms(seeds, request_ids, root_lens, depth)[:, depth:].expand(-1, num_lanes)


_KIND = KIND_OF[VERIFIER_OF["sampled"]]
_CHAIN = CONFIGS[_KIND.name]
_LOSSY = next(kind.name for kind in VERIFIER_KINDS if not kind.is_lossless)
_FINAL = "specsim.core.uniforms.final_uniforms"
_DRAFTED = f"{_REFERENCE}.drafting.draft_uniforms"
CONTROLS = (
    WrongEngine("typical acceptance", replace(CONFIGS[DEFAULT_VERIFIER], verifier=_LOSSY)),
    WrongEngine("accept if target ≥ draft", _CHAIN, _KIND.reference.replace(":", "."), at_least),
    WrongEngine("no residual after a rejection", _CHAIN, f"{_REFERENCE}.acceptance.residual", _no_residual),
    WrongEngine("one uniform for draft and bonus", _CHAIN, _FINAL, _final_uniforms_of_the_draft, 4608),
    WrongEngine("a bonus uniform for all rounds", _CHAIN, _FINAL, _final_uniforms_of_no_round),
    WrongEngine("draft uniforms for all rounds", CONFIGS["block"], _DRAFTED, _draft_uniforms_of_no_round, 4608),
    WrongEngine("one stream for draft and accept", _CHAIN, _DRAFTED, _draft_uniforms_of_accept, kind="standalone"),
    WrongEngine("KV of the accepted path not moved", _LANES, f"{_REFERENCE}.kv.commit", _no_commit, 13824),
)
