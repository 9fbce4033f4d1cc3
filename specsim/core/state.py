"""Values of named tensors: the base of the states that phases exchange, and the requests of a round."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from specsim.core.config import SamplingParams
from specsim.core.printed import parts_html, parts_text
from specsim.core.uniforms import seed_bits


def upload(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    """Copy a tensor to a device, without waiting where that is a GPU.

    It is sent from pinned memory: a copy from ordinary memory would wait until the GPU has done all earlier work.
    """
    to_gpu = device is not None and torch.device(device).type == "cuda" and tensor.device.type == "cpu"
    if not to_gpu or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def dtype_name(dtype: torch.dtype) -> str:
    """Name a type as torch does, without its module: float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, repr=False)
class State:
    """A value of named tensors, the output of one phase and the input of another."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The state's own tensors by name, without those that are None."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, torch.Tensor)}

    def __repr__(self) -> str:
        return parts_text(type(self).__name__, self._parts)

    def _repr_html_(self) -> str:
        return parts_html(type(self).__name__, self._parts)

    @property
    def _parts(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move the state to a device and its hidden states, the only tensors in the model's dtype, to a dtype."""
        return _upload(self, device, dtype)


@dataclass(frozen=True, slots=True, repr=False)
class PerRequest(State):
    """A state whose tensors all have one entry for each request along the first dimension."""

    def filter(self, requests: torch.Tensor) -> Self:
        """Select requests by index (i64), in that order.

        A slice would not do (sglang#9252).
        """
        return replace(self, **{f.name: _selected(getattr(self, f.name), requests) for f in fields(self)})

    @property
    def is_idle(self) -> bool:
        """Check whether the state has no requests."""
        return self._num_requests == 0

    @property
    def _num_requests(self) -> int:
        return len(next(iter(self.tensors.values())))

    def merge(self, other: Self) -> Self:
        """Append the requests of other to those of self.

        An idle state adds nothing. A tensor that one side lacks is 0 there.
        """
        if self.is_idle or other.is_idle:
            return other if self.is_idle else self
        sizes = (self._num_requests, other._num_requests)
        values = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return replace(self, **{name: _joined(*both, sizes) for name, both in values.items()})


def _selected(value: Any, requests: torch.Tensor) -> Any:
    return value if value is None else value.filter(requests) if isinstance(value, PerRequest) else value[requests]


def _joined(first: Any, second: Any, sizes: tuple[int, int]) -> Any:
    if isinstance(first, PerRequest):
        return first.merge(second)
    if first is None and second is None:
        return None
    first = second.new_zeros(sizes[0], *second.shape[1:]) if first is None else first
    second = first.new_zeros(sizes[1], *first.shape[1:]) if second is None else second
    return torch.cat([first, second])


def _upload(value: Any, device: torch.device | str | None, dtype: torch.dtype | None, name: str = "") -> Any:
    if isinstance(value, State):
        return replace(value, **{f.name: _upload(getattr(value, f.name), device, dtype, f.name) for f in fields(value)})
    if isinstance(value, torch.Tensor):
        return upload(value if dtype is None or name != "hidden" else value.to(dtype), device)
    return value


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
            seeds=torch.tensor([seed_bits(request_params.seed) for request_params in params], dtype=torch.int64),
            sampling=Sampling.of(params, vocab_size),
            num_rounds=torch.tensor([0] * len(lens) if num_rounds is None else num_rounds, dtype=torch.int64),
            draft_steps=torch.full((len(lens),), ALL_STEPS, dtype=torch.int32),
        )

    def after(self, num_accepted_tokens: torch.Tensor) -> Self:
        """Make the batch of the next round."""
        return replace(self, seq_lens=self.seq_lens + num_accepted_tokens, num_rounds=self.num_rounds + 1)
