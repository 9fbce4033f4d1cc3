"""The states of a round: one type for each phase, made by one phase and read by the next (sglang#24859).

Dimension key, used as suffix of tensor names everywhere:

    B requests · K topk · S num_steps · N num_draft_tokens (verify width, root included) · P page_size
    L seq_len (committed KV, bonus token excluded) · V vocabulary · H hidden · F target features · A attention heads
    D head dim · R rows of a flattened batch · C columns (keys) of one request · Q rows of one request
    W width of an accepted path (S + 1) · I draft steps so far

    DraftInput → draft → VerifyInput → verify → VerifyOutput.draft_extend_input → draft_extend → DraftInput
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Self

import torch

from specsim.core.config import SamplingParams
from specsim.core.uniforms import seed_bits


def _chosen(value, requests: torch.Tensor):
    return value if value is None else value.filter(requests) if isinstance(value, PerRequest) else value[requests]


def _joined(first, second):
    if first is None or second is None:
        return None
    return first.merge(second) if isinstance(first, PerRequest) else torch.cat([first, second])


def _moved(value, device, dtype, name: str = ""):
    if isinstance(value, State):
        return replace(value, **{f.name: _moved(getattr(value, f.name), device, dtype, f.name) for f in fields(value)})
    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=dtype if name == "hidden" else None)
    return value


class State:
    """A value of named tensors that one phase leaves to another."""

    __slots__ = ()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its own tensors by name, but for those that are None."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in values if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The state on another device, its hidden states (the only tensors in the model's dtype) in another dtype."""
        return _moved(self, device, dtype)


class PerRequest(State):
    """A state whose every tensor has one entry a request, along its first dimension."""

    __slots__ = ()

    def filter(self, requests: torch.Tensor) -> Self:
        """The requests at these places (int64), in that order; always by index, never by slice (sglang#9252)."""
        return replace(self, **{f.name: _chosen(getattr(self, f.name), requests) for f in fields(self)})

    def merge(self, other: Self) -> Self:
        """The requests of self followed by those of other."""
        return replace(self, **{f.name: _joined(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


@dataclass(frozen=True, slots=True)
class Sampling(PerRequest):
    """SamplingParams of a batch as tensors [B]; float64 so that no parameter is rounded here.

    logit_bias: [B, V], None where no request of the batch has any; is_biased: bool, whether a row of it has an entry
    other than 0, so that the others need not be read.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    is_biased: torch.Tensor
    logit_bias: torch.Tensor | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> Self:
        """Biases are held as soon as a request names a token, be its bias 0."""
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

    def merge(self, other: Self) -> Self:
        """The requests of self followed by those of other; where one side alone has biases the other's are 0."""
        merged, biases = PerRequest.merge(self, other), (self.logit_bias, other.logit_bias)
        held = next((bias for bias in biases if bias is not None), None)
        if held is None or merged.logit_bias is not None:
            return merged
        sizes = len(self.is_biased), len(other.is_biased)
        parts = [
            held.new_zeros(size, held.shape[1]) if bias is None else bias
            for size, bias in zip(sizes, biases, strict=True)
        ]
        return replace(merged, logit_bias=torch.cat(parts))


@dataclass(frozen=True, slots=True)
class Batch(PerRequest):
    """The requests of a round; no phase changes it.

    request_ids, req_pool_indices (rows of the pool's tables), seq_lens (L), prompt_lens, seeds (the bits of an unsigned
    64-bit seed), num_rounds (those a request has had): int64 [B]. sampling: the parameters of each request.
    """

    request_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    prompt_lens: torch.Tensor
    seeds: torch.Tensor
    sampling: Sampling
    num_rounds: torch.Tensor

    @property
    def size(self) -> int:
        return len(self.request_ids)

    @property
    def rows_and_lens(self) -> list[tuple[int, int]]:
        """(row of the pool's tables, L) of each request, on the host."""
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
        """Requests before their first round, or after so many: seq_lens are the prompts' lengths."""
        lens = torch.tensor(prompt_lens, dtype=torch.int64)
        seeds = [seed_bits(each.seed) for each in params]
        ids, rows, seeds = (torch.tensor(column, dtype=torch.int64) for column in (request_ids, rows, seeds))
        rounds = torch.zeros_like(lens) if num_rounds is None else torch.tensor(num_rounds, dtype=torch.int64)
        return cls(ids, rows, lens, lens, seeds, Sampling.of(params, vocab_size), rounds)

    def after(self, num_accepted_tokens: torch.Tensor) -> Self:
        """The batch of the next round."""
        return replace(self, seq_lens=self.seq_lens + num_accepted_tokens, num_rounds=self.num_rounds + 1)


@dataclass(frozen=True, slots=True)
class PrefillInput(State):
    """A chunk of every request's prompt, flattened over requests.

    input_ids: i64 [R]. row_starts: i64 [B+1], request b owns rows row_starts[b]..row_starts[b+1]. start_lens: i64 [B],
    tokens whose KV is there already. A chunk has at least one row. next_tokens: i64 [B], the token after the chunk
    where it is known (a chunk that is not the last, a resumed request), else -1 and it is sampled.
    """

    input_ids: torch.Tensor
    row_starts: torch.Tensor
    start_lens: torch.Tensor
    next_tokens: torch.Tensor

    @property
    def requests(self) -> torch.Tensor:
        """i64 [R]: the request of each row."""
        return torch.arange(len(self.start_lens), device=self.row_starts.device).repeat_interleave(
            self.row_starts.diff()
        )

    @property
    def columns(self) -> torch.Tensor:
        """i64 [R]: the column, which is the position, of each row."""
        return (
            torch.arange(len(self.input_ids), device=self.row_starts.device)
            + (self.start_lens - self.row_starts[:-1])[self.requests]
        )

    @property
    def last_rows(self) -> torch.Tensor:
        """i64 [B]: the last row of each request."""
        return self.row_starts[1:] - 1

    @classmethod
    def whole(cls, prompts: Sequence[Sequence[int]]) -> Self:
        """Whole prompts from their first token on, the next token to be sampled."""
        lens = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        input_ids = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
        row_starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        return cls(input_ids, row_starts, torch.zeros_like(lens), torch.full_like(lens, -1))


@dataclass(frozen=True, slots=True)
class PrefillOutput(State):
    """next_tokens i32 [B] and their logprobs [B] under the target's law; draft_input feeds the first round."""

    next_tokens: torch.Tensor
    logprobs: torch.Tensor
    draft_input: "DraftInput"


@dataclass(frozen=True, slots=True)
class DraftInput(PerRequest):
    """What prefill and draft-extend leave to the next draft phase.

    topk_p: f32 [B, K], the drafter's probabilities for the first drafts, at T = 1, or at the request's T where drafts
    are sampled; topk_index: i64 [B, K], their target ids; hidden: [B, H], the drafter's state they came from, None
    where it has none; bonus_tokens: i32 [B], the root of the next tree. draft_prob: f32 [B, V], the law that the first
    drafts were drawn from, by target id, 0 where the temperature is 0; None where verify reads none.
    """

    topk_p: torch.Tensor
    topk_index: torch.Tensor
    hidden: torch.Tensor | None
    bonus_tokens: torch.Tensor
    draft_prob: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, topk: int, hidden_size: int, dtype: torch.dtype = torch.float32, vocab_size: int | None = None
    ) -> Self:
        """The state of no request: what is installed when all have finished, so that the next merge is well defined.

        vocab_size: given where there are draft laws.
        """
        return cls(
            topk_p=torch.empty(0, topk),
            topk_index=torch.empty(0, topk, dtype=torch.int64),
            hidden=torch.empty(0, hidden_size, dtype=dtype),
            bonus_tokens=torch.empty(0, dtype=torch.int32),
            draft_prob=None if vocab_size is None else torch.empty(0, vocab_size),
        )

    @property
    def is_idle(self) -> bool:
        return len(self.topk_index) == 0

    def merge(self, other: Self) -> Self:
        """The requests of self followed by those of other; an idle state adds nothing, whatever its hidden is."""
        return other if self.is_idle else self if other.is_idle else PerRequest.merge(self, other)


@dataclass(frozen=True, slots=True)
class Candidates(State):
    """All a drafter considered, before selection: the pool of K + (S-1)K² nodes, of KS where drafts are sampled.

    tokens: i64 and scores: f32 [B, K+(S-1)K²]; parent_list: i64 [B, max(1, K(S-1)+1)], for each block of K siblings
    the flat index of their parent, -1 for the root; a block of one where drafts are sampled, but for the root's.
    draft_logits: of every draft forward [B, K, draft vocabulary]; only the reference keeps them, for whoever has to say
    how close a decision was. draft_prob: see VerifyInput, to which it is handed on.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parent_list: torch.Tensor
    draft_logits: tuple[torch.Tensor, ...] = ()
    draft_prob: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class VerifyInput(State):
    """A tree a request, ready for the target's forward. Node 0 is the root, the bonus token of the round before.

    draft_tokens: i64 [B, N]; parents: i64 [B, N], node index of the parent, -1 for the root; scores: f32 [B, N], the
    ranking score of each node, the root's that of the empty path. positions: i64 [B·N] = L + depth. mask: bool [B, N,
    N] (layout QLEN_ONLY), row sees column. retrieve_index: i64 [B, N] = b·N + j; retrieve_next_token,
    retrieve_next_sibling: i64 [B, N], first child and next sibling as node indices, -1 for none. cache_locations: i64
    [B·N], slots in the target pool, -1 for a node at or beyond the length limit. candidates: what the tree was chosen
    from, where it was. draft_prob: f32 [B, 1+K(S-1), V], by node the law that its children were drawn from, by target
    id; 0 where the temperature is 0; None where verify reads none.
    """

    draft_tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    cache_locations: torch.Tensor
    candidates: Candidates | None = None
    draft_prob: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftExtendInput(State):
    """The accepted rows, for the drafter to rewrite its KV from the target's features.

    Row j of request b stands at position and column seq_lens[b] + j, holds the token *after* accepted node j and that
    node's features. row_starts: i64 [B+1]; hidden: [R, F]; input_ids, positions, cache_locations (slot, -1 for a row
    that writes nothing): i64 [R]. num_accepted_drafts, num_accepted_tokens, bonus_tokens: i32 [B]. seq_lens (L before
    the round), req_pool_indices: i64 [B]. With `extend="fixed"` rows num_accepted_tokens and later of a request are
    junk.
    """

    row_starts: torch.Tensor
    hidden: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    cache_locations: torch.Tensor
    num_accepted_drafts: torch.Tensor
    num_accepted_tokens: torch.Tensor
    bonus_tokens: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor

    @property
    def last_rows(self) -> torch.Tensor:
        """i64 [B]: the row of each request's last accepted token, the only one that feeds the next draft phase."""
        return self.row_starts[:-1] + self.num_accepted_tokens - 1


@dataclass(frozen=True, slots=True)
class Verdict(State):
    """How far the target took every tree.

    predict: i32 [B·N], by node the token after it, -1 off the accepted path. accept_index: i32 [B, W], global node ids,
    column 0 the root, padded with -1. num_accepted_drafts: i32 [B] in [0, S]; num_accepted_tokens: that + 1, the bonus
    included. logprobs: f32 [B, W], of predict at accept_index under penalties, bias and temperature, 0 where padded.
    """

    predict: torch.Tensor
    accept_index: torch.Tensor
    num_accepted_drafts: torch.Tensor
    num_accepted_tokens: torch.Tensor
    logprobs: torch.Tensor

    def accepted_tokens(self) -> list[list[int]]:
        """The new tokens of each request, bonus last."""
        rows = zip(self.accept_index.tolist(), self.num_accepted_tokens.tolist(), strict=True)
        predict = self.predict.tolist()
        return [[predict[node] for node in path[:count]] for path, count in rows]


@dataclass(frozen=True, slots=True)
class VerifyOutput(State):
    """Everything that verify leaves: its verdict, the target's logits, and the input of draft-extend."""

    verdict: Verdict
    target_logits: torch.Tensor  # [B·N, V] in the model's dtype, as the target made them
    draft_extend_input: DraftExtendInput


class RoundOutput(NamedTuple):
    """What the three phases of a round left, in their order."""

    verify_input: VerifyInput
    verify_output: VerifyOutput
    draft_input: DraftInput


class Advance(NamedTuple):
    """What a round leaves to a serving loop: how far it went, and what the next round starts from."""

    verdict: Verdict
    draft_input: DraftInput
    batch: Batch
