"""The requests of a round and how each is sampled, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch

from specsim.core.config import SamplingParams
from specsim.core.state import PerRequest
from specsim.core.uniforms import seed_bits

ALL_STEPS = 2**31 - 1  # draft steps of a request that takes all of its round's setting


@dataclass(frozen=True, slots=True, repr=False)
class Sampling(PerRequest):
    """SamplingParams of a batch, in float64 so that no parameter is rounded here."""

    temperature: torch.Tensor  # f64 [B]
    top_k: torch.Tensor  # i64 [B]
    top_p: torch.Tensor  # f64 [B]
    min_p: torch.Tensor  # f64 [B]
    repetition_penalty: torch.Tensor  # f64 [B]
    presence_penalty: torch.Tensor  # f64 [B]
    frequency_penalty: torch.Tensor  # f64 [B]
    is_biased: torch.Tensor  # bool [B], whether the row of logit_bias has an entry other than 0
    logit_bias: torch.Tensor | None  # f64 [B, V], None where no request names a token

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> Self:
        """Tabulate parameters.

        logit_bias is a tensor as soon as a request names a token, even with bias 0.
        """
        values = {
            f.name: torch.tensor([getattr(p, f.name) for p in params], dtype=torch.float64)
            for f in fields(cls)
            if f.name not in ("is_biased", "logit_bias")
        }
        values["top_k"] = torch.tensor([min(p.top_k, vocab_size) for p in params], dtype=torch.int64)
        is_biased = torch.tensor([any(p.logit_bias.values()) for p in params], dtype=torch.bool)
        if not any(p.logit_bias for p in params):
            return cls(**values, is_biased=is_biased, logit_bias=None)
        bias_BV = torch.zeros(len(params), vocab_size, dtype=torch.float64)
        for bias_V, p in zip(bias_BV, params, strict=True):
            for token, bias in p.logit_bias.items():
                bias_V[token] = float(bias)
        return cls(**values, is_biased=is_biased, logit_bias=bias_BV)


@dataclass(frozen=True, slots=True, repr=False)
class Batch(PerRequest):
    """The requests of a round, which no phase changes."""

    request_ids: torch.Tensor  # i64 [B]
    req_pool_indices: torch.Tensor  # i64 [B], rows of the pool's tables
    seq_lens: torch.Tensor  # i64 [B], L: tokens with committed KV
    prompt_lens: torch.Tensor  # i64 [B]
    seeds: torch.Tensor  # i64 [B], the bits of unsigned 64-bit seeds
    sampling: Sampling
    num_rounds: torch.Tensor  # i64 [B], rounds that the request has had
    # i32 [B], most draft steps of the request in this round: nodes deeper than that are dead. 0: it decodes plainly
    draft_steps: torch.Tensor

    @property
    def size(self) -> int:
        """Number of requests, B."""
        return len(self.request_ids)

    @property
    def rows_and_lens(self) -> list[tuple[int, int]]:
        """Pairs (row of the pool's tables, L), one for each request, on the host."""
        return list(zip(self.req_pool_indices.tolist(), self.seq_lens.tolist(), strict=True))

    @classmethod
    def of(
        cls,
        request_ids: Sequence[int],
        rows: Sequence[int],
        prompt_lens: Sequence[int],
        params: Sequence[SamplingParams],
        vocab_size: int,
        num_rounds: Sequence[int] | None = None,
    ) -> Self:
        """Make the batch of requests whose prompts are prefilled.

        num_rounds: rounds that each request has had; None: none.
        """
        lens = torch.tensor(prompt_lens, dtype=torch.int64)
        return cls(
            request_ids=torch.tensor(request_ids, dtype=torch.int64),
            req_pool_indices=torch.tensor(rows, dtype=torch.int64),
            seq_lens=lens,
            prompt_lens=lens,
            seeds=torch.tensor([seed_bits(each.seed) for each in params], dtype=torch.int64),
            sampling=Sampling.of(params, vocab_size),
            num_rounds=torch.tensor([0] * len(lens) if num_rounds is None else num_rounds, dtype=torch.int64),
            draft_steps=torch.full((len(lens),), ALL_STEPS, dtype=torch.int32),
        )

    def after(self, num_accepted_tokens: torch.Tensor) -> Self:
        """Make the batch of the next round."""
        return replace(self, seq_lens=self.seq_lens + num_accepted_tokens, num_rounds=self.num_rounds + 1)
