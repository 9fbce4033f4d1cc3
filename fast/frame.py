"""The static buffers of a round, and how states are copied into them and out of them."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Advance, Batch, DraftExtendInput, DraftInput, State, Verdict, VerifyInput
from specsim.core.pool import KVPool
from specsim.fast.drafting import Lanes
from specsim.fast.runtime.graph import Block, Buffers, Graph
from specsim.fast.vocabulary.penalties import Allowed

_State = TypeVar("_State", bound=State)
# What the rows of a padded request hold, where it is not zero.
PADDING = {
    "req_pool_indices": -1,
    "cache_locations": -1,
    "parents": -1,
    "retrieve_next_token": -1,
    "retrieve_next_sibling": -1,
}

# What a round leaves to the next one, in this order: its draft input, lengths and numbers of rounds; then the verdict.
_PROGRESS = ("seq_lens", "num_rounds")
_VERDICT = len(fields(Verdict))
# Fields of DraftExtendInput that have a row for every token, not for every request.
_ROWS = ("hidden", "input_ids", "positions", "cache_locations")


class Inlet:
    """The static batch and draft input that a round starts from, and what was copied into them last.

    States are values, so what was copied last and is given again is there still; and what a round left for the next
    one comes back in a single copy.
    """

    def __init__(self, batch: Batch, draft_input: DraftInput, raw: torch.Tensor):
        """raw: the memory of draft_input and of the batch's lengths and numbers of rounds."""
        self.batch, self.draft_input, self._raw = batch, draft_input, raw
        self._held: dict[str, Any] = {}
        self._left: tuple[Advance, torch.Tensor] | None = None

    def expect(self, left: Advance, raw: torch.Tensor) -> None:
        """What a round left, and memory that begins with it as this one's does."""
        self._left = left, raw[: len(self._raw)]

    def load(self, batch: Batch, draft_input: DraftInput | None = None) -> None:
        """Copy what is not there yet into the first rows, and pad the others."""
        if self._left is not None and self._left[0].draft_input is draft_input is not self._held.get("draft_input"):
            left, raw = self._left
            self._raw.copy_(raw)
            self._held |= {"draft_input": draft_input, "batch": None} | _named("draft_input", draft_input)
            self._held |= {f"batch.{name}": getattr(left.batch, name) for name in _PROGRESS}
        self._load("batch", self.batch, batch)
        if draft_input is not None:
            self._load("draft_input", self.draft_input, draft_input)

    def _load(self, path: str, static: Any, value: Any) -> None:
        if self._held.get(path) is value:
            return
        self._held[path] = None
        if isinstance(value, State):
            for each in fields(value):
                self._load(f"{path}.{each.name}", getattr(static, each.name), getattr(value, each.name))
        elif value is not None:
            _fill(static, value, path.rpartition(".")[2])
        self._held[path] = value


@dataclass(frozen=True, slots=True)
class Frame:
    """What every phase of a round reads and leaves, for `bucket` requests over one pool, and the graphs over it.

    extend_input has S+1 rows a request in both modes of draft-extend. progress: lengths and numbers of rounds after
    the round, i64 [bucket]. outlet: the memory of next_draft_input, progress and verdict. forward: `features` [B·N, F]
    and `target_logits` [B·N, V] of the target's last forward, as the target made them; recorded: those of each graph's.
    allowed: what grammars allow after every node, which the host writes between draft and verify; None where there are
    no grammars.
    """

    bucket: int
    pools: KVPool
    buffers: Buffers
    inlet: Inlet
    lanes: Lanes
    verify_input: VerifyInput
    verdict: Verdict
    extend_input: DraftExtendInput
    next_draft_input: DraftInput
    progress: tuple[torch.Tensor, torch.Tensor]
    outlet: Block
    allowed: Allowed | None = None
    forward: dict[str, torch.Tensor] = field(default_factory=dict)
    graphs: dict[tuple[str, ...], Graph] = field(default_factory=dict)
    recorded: dict[tuple[str, ...], dict[str, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        bucket: int,
        pools: KVPool,
        config: SpecConfig,
        vocab_size: int,
        draft_hidden_size: int,
        num_features: int,
        dtype: torch.dtype,
        has_grammars: bool = False,
    ) -> "Frame":
        """Buffers on the pool's device that hold padded requests only."""
        buffers = Buffers(pools.req_to_token.device)
        draft_input = _padded_draft_input(bucket, config, draft_hidden_size, dtype, vocab_size)
        padded = [SamplingParams(logit_bias={0: 0.0})] * bucket  # so that there is a buffer for biases
        batch = Batch.of([0] * bucket, [-1] * bucket, [0] * bucket, padded, vocab_size)
        verdict = _padded_verdict(bucket, config)
        progress = {name: getattr(batch, name) for name in _PROGRESS}
        inlet = buffers.block(
            _named("draft_input", draft_input) | {f"batch.{name}": value for name, value in progress.items()}
        )
        outlet = buffers.block(
            _named("next_draft_input", draft_input)
            | {f"progress.{name}": value for name, value in progress.items()}
            | _named("verdict", verdict)
        )
        *entering, seq_lens, num_rounds = inlet.tensors.values()
        next_draft_input, next_progress, next_verdict = _left(list(outlet.tensors.values()))
        lanes = buffers.like("lanes", Lanes.empty(bucket, draft_hidden_size, config, dtype, "cpu", vocab_size))
        for buffer in lanes.buffers:  # a capture of one step reads what other steps would have written
            buffer.zero_()
        lanes.candidates.parent_list.fill_(-1)  # the root's block, all that plain decoding has
        batch = buffers.like("batch", replace(batch, **dict.fromkeys(_PROGRESS)))
        batch = replace(batch, seq_lens=seq_lens, num_rounds=num_rounds)
        verify_input = buffers.like("verify_input", _padded_verify_input(bucket, config))
        return cls(
            bucket=bucket,
            pools=pools,
            buffers=buffers,
            inlet=Inlet(batch, DraftInput(*entering), inlet.raw),
            lanes=lanes,
            verify_input=replace(
                verify_input,
                candidates=replace(lanes.candidates, draft_prob=None),
                draft_prob=lanes.candidates.draft_prob,
            ),
            verdict=next_verdict,
            extend_input=buffers.like("extend_input", _padded_extend_input(bucket, config, num_features, dtype)),
            next_draft_input=next_draft_input,
            progress=next_progress,
            outlet=outlet,
            allowed=buffers.like("allowed", Allowed.empty(*verify_input.draft_tokens.shape, vocab_size))
            if has_grammars
            else None,
        )

    @property
    def batch(self) -> Batch:
        return self.inlet.batch

    @property
    def draft_input(self) -> DraftInput:
        return self.inlet.draft_input

    def advance(self, batch: Batch) -> Advance:
        """A copy of what the round of this batch left to the next one."""
        raw, copies = self.outlet.copy(batch.size, self.bucket)
        draft_input, (seq_lens, num_rounds), verdict = _left(copies)
        left = Advance(verdict, draft_input, replace(batch, seq_lens=seq_lens, num_rounds=num_rounds))
        self.inlet.expect(left, raw)
        return left


def _named(name: str, state: State) -> dict[str, torch.Tensor]:
    return {f"{name}.{field}": value for field, value in state.tensors.items()}


def _left(tensors: list[torch.Tensor]) -> tuple[DraftInput, tuple[torch.Tensor, torch.Tensor], Verdict]:
    """The outlet's tensors as what they are; a draft input has a law, its last field, only where one is read."""
    *entering, seq_lens, num_rounds = tensors[:-_VERDICT]
    return DraftInput(*entering), (seq_lens, num_rounds), Verdict(*tensors[-_VERDICT:])


def _padded_draft_input(
    bucket: int, config: SpecConfig, hidden_size: int, dtype: torch.dtype, vocab_size: int
) -> DraftInput:
    topk = 0 if config.is_plain else config.topk
    return DraftInput(
        topk_p=torch.zeros(bucket, topk),
        topk_index=torch.zeros(bucket, topk, dtype=torch.int64),
        hidden=torch.zeros(bucket, hidden_size, dtype=dtype),
        bonus_tokens=torch.zeros(bucket, dtype=torch.int32),
        draft_prob=torch.zeros(bucket, vocab_size) if config.has_draft_prob else None,
    )


def _padded_verify_input(bucket: int, config: SpecConfig) -> VerifyInput:
    num_nodes = config.num_draft_tokens
    none_BN = torch.full((bucket, num_nodes), -1)
    return VerifyInput(
        draft_tokens=torch.zeros_like(none_BN),
        parents=none_BN,
        scores=torch.zeros(bucket, num_nodes),
        positions=torch.zeros_like(none_BN).flatten(),
        mask=torch.zeros(bucket, num_nodes, num_nodes, dtype=torch.bool),
        retrieve_index=torch.zeros_like(none_BN),
        retrieve_next_token=none_BN,
        retrieve_next_sibling=none_BN,
        cache_locations=none_BN.flatten(),
    )


def _padded_verdict(bucket: int, config: SpecConfig) -> Verdict:
    none_BW = torch.full((bucket, config.num_steps + 1), -1, dtype=torch.int32)
    return Verdict(
        predict=torch.full((bucket * config.num_draft_tokens,), -1, dtype=torch.int32),
        accept_index=none_BW,
        num_accepted_drafts=torch.zeros(bucket, dtype=torch.int32),
        num_accepted_tokens=torch.ones(bucket, dtype=torch.int32),
        logprobs=torch.zeros(none_BW.shape),
    )


def _padded_extend_input(bucket: int, config: SpecConfig, num_features: int, dtype: torch.dtype) -> DraftExtendInput:
    width = config.num_steps + 1
    ids_R, zeros_B = torch.zeros(bucket * width, dtype=torch.int64), torch.zeros(bucket, dtype=torch.int32)
    return DraftExtendInput(
        row_starts=width * torch.arange(bucket + 1),
        hidden=torch.zeros(bucket * width, num_features, dtype=dtype),
        input_ids=ids_R,
        positions=ids_R,
        cache_locations=ids_R - 1,
        num_accepted_drafts=zeros_B,
        num_accepted_tokens=zeros_B + 1,
        bonus_tokens=zeros_B,
        seq_lens=zeros_B.long(),
        req_pool_indices=zeros_B.long() - 1,
    )


def load(static: State, state: State) -> None:
    """Copy a state into the first rows of its static buffers and pad the others; what it lacks stays as it is."""
    for name in (each.name for each in fields(state)):
        buffer, value = getattr(static, name), getattr(state, name)
        if isinstance(value, State):
            load(buffer, value)
        elif value is not None:
            _fill(buffer, value, name)


def _fill(buffer: torch.Tensor, value: torch.Tensor, name: str) -> None:
    size = len(value)
    if size == len(buffer):
        buffer.copy_(value)
    else:
        buffer[:size].copy_(value)
        buffer[size:].fill_(PADDING.get(name, 0))


def unload(static: _State, size: int, bucket: int) -> _State:
    """A copy of what belongs to the first `size` of `bucket` requests."""

    def taken(value: Any) -> Any:
        if isinstance(value, State):
            return unload(value, size, bucket)
        return value[: size * (len(value) // bucket)].clone() if isinstance(value, torch.Tensor) else value

    return replace(static, **{each.name: taken(getattr(static, each.name)) for each in fields(static)})


def load_extend_input(static: DraftExtendInput, state: DraftExtendInput, width: int) -> None:
    """Copy a state of any rows a request into buffers of `width` rows a request; rows it lacks write nothing."""
    counts = state.row_starts.diff()
    starts = width * torch.arange(len(counts), device=counts.device)
    rows = torch.arange(len(state.input_ids), device=counts.device) + (
        starts - state.row_starts[:-1]
    ).repeat_interleave(counts)
    for name in (each.name for each in fields(state) if each.name != "row_starts"):
        buffer, value = getattr(static, name), getattr(state, name)
        buffer.fill_(PADDING.get(name, 0))
        buffer[rows if name in _ROWS else slice(len(value))] = value
    static.num_accepted_tokens[len(counts) :].fill_(1)


def unload_extend_input(static: DraftExtendInput, size: int, width: int, extend: str) -> DraftExtendInput:
    """A copy of the first `size` requests' rows, of the accepted ones only in mode `ragged`."""
    counts = static.num_accepted_tokens[:size].long()
    counts = counts if extend == "ragged" else torch.full_like(counts, width)
    kept = (torch.arange(width, device=counts.device) < counts[:, None]).flatten().nonzero()[:, 0]
    rows = {name: getattr(static, name)[kept] for name in _ROWS}
    requests = {
        each.name: getattr(static, each.name)[:size].clone() for each in fields(static) if each.name not in _ROWS
    }
    row_starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return DraftExtendInput(**{**requests, **rows, "row_starts": row_starts})
