"""A request of the oracle: its constants, its random draws, and the logits of its next token."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.reference.oracle_forward import target_forward


@dataclass(frozen=True, slots=True)
class Draws:
    """Random draws of a request."""

    uniform: Callable[[str, int, int, int], float]  # of (stream, L of the round's root, depth, index)
    noise: Callable[[int], torch.Tensor]  # Gumbel noise [V] of the token at a position


@dataclass(frozen=True, slots=True, eq=False)
class OracleRequest:
    """Constants of one request."""

    target: SimpleNamespace
    drafter: Any  # SimpleNamespace of a drafter with weights, a token drafter, None in plain decoding
    config: SpecConfig
    sampling: SamplingParams
    draws: Draws
    prompt_len: int
    max_len: int
    grammar: Any  # a specsim.core.grammar.Grammar, None if unconstrained
    lookup: Any = None  # a token drafter next to one with weights, whose drafts, if any, take the place of those

    @property
    def draft_config(self) -> Any:
        """The drafter's specsim.core.drafter.DrafterConfig."""
        return self.drafter and self.drafter.config

    @property
    def draft_tensors(self) -> dict[str, torch.Tensor]:
        """The drafter's tensors."""
        return self.drafter.tensors if self.drafter else {}

    @property
    def draft_head(self) -> torch.Tensor:
        """The drafter's head, [draft vocabulary, H], or the target's where it has none of its own."""
        name = "lm_head.weight"
        return self.draft_tensors[name] if name in self.draft_tensors else self.target.tensors[name]

    @property
    def draws_drafts(self) -> bool:
        """Check whether drafts are drawn, rather than the drafter's best tokens."""
        return self.config.is_sampled and self.sampling.temperature > 0


def next_logits(request: OracleRequest, row: list[int], counted: list[int]) -> torch.Tensor:
    """Logits of the token after `row`, f64 [V], after the penalties for `counted`, the bias and the grammar."""
    sampling = request.sampling
    logits = target_forward(request.target.config, request.target.tensors, row, ())[0][-1].double()
    seen = logits[counted]
    penalty = sampling.repetition_penalty
    logits[counted] = torch.where(seen > 0, seen / penalty, seen * penalty)
    count_V = torch.bincount(torch.tensor(counted[request.prompt_len :], dtype=torch.int64), minlength=len(logits))
    logits -= sampling.frequency_penalty * count_V + sampling.presence_penalty * (count_V > 0)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    return logits.masked_fill(~allowed(request, row, len(logits)), -math.inf)


def allowed(request: OracleRequest, row: list[int], vocab_size: int) -> torch.Tensor:
    """Find the tokens that the grammar allows, bool [V].

    All are allowed without a grammar, and after a row that violates it or has ended.
    """
    matcher = request.grammar.matcher() if request.grammar else None
    for token in row[request.prompt_len :]:
        if matcher is None or matcher.has_ended or not matcher.advance(token):
            return torch.ones(vocab_size, dtype=torch.bool)
    return torch.ones(vocab_size, dtype=torch.bool) if matcher is None or matcher.has_ended else matcher.allowed()
