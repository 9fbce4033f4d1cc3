"""What the test must reject: a lossy verifier, and engines of the reference with one thing wrong, while a test lasts.

Each control says what is put in the place of one function of the reference; nothing else reaches it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from specsim.core.config import SpecConfig
from specsim.core.uniforms import draft_uniforms, final_uniforms
from specsim.correctness.statistics.settings import CONFIGS
from specsim.correctness.wrong_rules import at_least

_COLUMN = "specsim.reference"
_DRAFTER = f"{_COLUMN}.drafters.autoregressive"
# Of four lanes it is seldom the first that is accepted, whose KV stands where the path's belongs.
_LANES = SpecConfig(topk=4, num_steps=2, num_draft_tokens=9, page_size=4, verifier="multi_round")


@dataclass(frozen=True, slots=True)
class Control:
    """Something wrong. place: the function that is replaced, None where a setting is enough. tokens: with so many it
    has to be rejected.
    """

    name: str
    config: SpecConfig
    place: str | None = None
    wrong: Callable[..., Any] | None = None
    tokens: int = 2304

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Within it the reference does what the control says."""
        if self.place is None:
            yield
            return
        with patch(self.place, self.wrong):
            yield


def _final_uniforms_of_no_round(seeds, request_ids, root_lens):
    """The same uniform for every bonus token of a request."""
    return final_uniforms(seeds, request_ids, torch.zeros_like(root_lens))


def _draft_uniforms_of_no_round(seeds, request_ids, root_lens, depth, num_lanes):
    """The same uniforms for the drafts of every round."""
    return draft_uniforms(seeds, request_ids, torch.zeros_like(root_lens), depth, num_lanes)


def _final_uniforms_of_the_draft(seeds, request_ids, root_lens):
    """The uniform that drew the round's first draft draws its bonus token too."""
    return draft_uniforms(seeds, request_ids, root_lens, 0, 1)[:, 0]


def _no_residual(prob_V, draft_prob_V):
    """After a rejection the target's own law is drawn from, as if nothing had been rejected."""
    return prob_V


def _no_commit(batch, cache_locations, accept_index, pools):
    """The accepted path's KV stays where the tree wrote it."""


_REJECTION = CONFIGS["rejection"]
CONTROLS = (
    Control("typical acceptance", replace(CONFIGS["target_only"], verifier="typical")),
    Control("accept if target ≥ draft", _REJECTION, f"{_COLUMN}.acceptance.rejection", at_least),
    Control("no residual after a rejection", _REJECTION, f"{_COLUMN}.acceptance.residual", _no_residual),
    Control(
        "one uniform for draft and bonus",
        _REJECTION,
        f"{_COLUMN}.verify.final_uniforms",
        _final_uniforms_of_the_draft,
        4608,
    ),
    Control(
        "a bonus uniform for all rounds", _REJECTION, f"{_COLUMN}.verify.final_uniforms", _final_uniforms_of_no_round
    ),
    Control(
        "draft uniforms for all rounds",
        CONFIGS["block"],
        f"{_DRAFTER}.draft_uniforms",
        _draft_uniforms_of_no_round,
        4608,
    ),
    Control("KV of the accepted path not moved", _LANES, f"{_COLUMN}.kv.commit", _no_commit, 13824),
)
