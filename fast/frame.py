"""Static buffers of a round: its inputs, the states between its phases, and its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import torch

from specsim.core.phases import Advance, Batch, DraftExtendInput, DraftInput, State, Verdict, VerifyInput
from specsim.core.pool import KVPool
from specsim.fast.kv import Progress
from specsim.fast.lanes import Lanes
from specsim.fast.runtime import padding
from specsim.fast.runtime.buffers import Block, Buffers, named
from specsim.fast.runtime.graph import Graph
from specsim.fast.runtime.padding import RoundShape
from specsim.fast.runtime.sections import Sections
from specsim.fast.runtime.states import fill
from specsim.fast.vocabulary.penalties import Allowed

_VERDICT = len(fields(Verdict))


class Inlet:
    """The static batch and draft input from which a round starts.

    States are values, so a state that was copied last and is passed again is not copied. The output of one round
    becomes the next one's input in a single copy.
    """

    def __init__(self, batch: Batch, draft_input: DraftInput, raw: torch.Tensor) -> None:
        self.batch = batch
        self.draft_input = draft_input
        self._raw = raw  # memory of draft_input, then of the batch's progress, as an outlet's begins
        self._held: dict[str, Any] = {}  # by path: the state or tensor that was copied last
        self._expected: Expected | None = None

    @classmethod
    def of(cls, shape: RoundShape, buffers: Buffers) -> Self:
        """Make buffers of padded requests only."""
        batch = padding.padded_batch(shape)
        draft_input = padding.padded_draft_input(shape)
        block = buffers.block(named("draft_input", draft_input.tensors) | named("batch", Progress.of(batch)._asdict()))
        *entering, seq_lens, num_rounds = block.tensors.values()
        others = buffers.like("batch", replace(batch, seq_lens=None, num_rounds=None))
        batch = replace(others, seq_lens=seq_lens, num_rounds=num_rounds)
        return cls(batch, DraftInput(*entering), block.raw)

    def expect(self, left: Advance, raw: torch.Tensor) -> None:
        """Remember a round's output, and a copy of its outlet's memory."""
        self._expected = Expected(left, raw[: len(self._raw)])

    def load(self, batch: Batch, draft_input: DraftInput | None = None) -> None:
        """Copy the states into the first rows, and pad the rest."""
        expected = self._expected
        if expected and expected.left.draft_input is draft_input is not self._held.get("draft_input"):
            self._load_expected(expected)
        self._load("batch", self.batch, batch)
        if draft_input is not None:
            self._load("draft_input", self.draft_input, draft_input)

    def _load_expected(self, expected: "Expected") -> None:
        """Copy the last round's draft input and progress."""
        self._raw.copy_(expected.raw)
        draft_input = expected.left.draft_input
        self._held |= {"draft_input": draft_input, "batch": None} | named("draft_input", draft_input.tensors)
        self._held |= named("batch", Progress.of(expected.left.batch)._asdict())

    def _load(self, path: str, static: Any, value: Any) -> None:
        if self._held.get(path) is value:
            return
        self._held[path] = None
        if isinstance(value, State):
            for each in fields(value):
                self._load(f"{path}.{each.name}", getattr(static, each.name), getattr(value, each.name))
        elif value is not None:
            fill(static, value, path.rpartition(".")[2])
        self._held[path] = value


class Expected(NamedTuple):
    """The output of a round, which is likely to be the next round's input."""

    left: Advance
    raw: torch.Tensor  # u8, the inlet's memory as that round would fill it


@dataclass(frozen=True, slots=True)
class Outlet:
    """The static output states of a round, in one block of memory that starts with the next round's input."""

    draft_input: DraftInput  # of the next round
    progress: Progress  # after the round
    verdict: Verdict
    block: Block

    @classmethod
    def of(cls, shape: RoundShape, buffers: Buffers) -> Self:
        """Make buffers of padded requests only."""
        block = buffers.block(
            named("next_draft_input", padding.padded_draft_input(shape).tensors)
            | named("progress", Progress.of(padding.padded_batch(shape))._asdict())
            | named("verdict", padding.padded_verdict(shape).tensors)
        )
        return cls(*_left(list(block.tensors.values())), block)

    def copy(self, batch: Batch, bucket: int) -> tuple[Advance, torch.Tensor]:
        """Copy the output of a batch's round, and return the copy's memory too."""
        raw, tensors = self.block.copy(batch.size, bucket)
        draft_input, progress, verdict = _left(tensors)
        return Advance(verdict, draft_input, replace(batch, **progress._asdict())), raw


def _left(tensors: Sequence[torch.Tensor]) -> tuple[DraftInput, Progress, Verdict]:
    """Name an outlet's tensors, where the draft input may lack its last field, the distribution."""
    *entering, seq_lens, num_rounds = tensors[:-_VERDICT]
    return DraftInput(*entering), Progress(seq_lens, num_rounds), Verdict(*tensors[-_VERDICT:])


class TargetOutput(NamedTuple):
    """Outputs of the target's last forward, as the target wrote them."""

    features: torch.Tensor  # [B·N, F]
    logits: torch.Tensor  # [B·N, V]


class Recording(NamedTuple):
    """A graph over a frame's buffers."""

    graph: Graph
    target_output: TargetOutput  # memory in which a replay leaves the target's last forward


@dataclass(slots=True)
class Frame:
    """All buffers that the phases of a round read and write, over one pool, and the graphs captured over them."""

    shape: RoundShape
    pools: KVPool
    buffers: Buffers  # guards of the states below
    inlet: Inlet
    lanes: Lanes
    verify_input: VerifyInput
    extend_input: DraftExtendInput  # S+1 rows a request in both modes of draft-extend
    outlet: Outlet
    allowed: Allowed | None  # tokens that grammars allow after every node, which the host writes before verify
    target_output: TargetOutput  # empty before the first forward
    recordings: dict[Sections, Recording] = field(default_factory=dict)

    @classmethod
    def of(cls, shape: RoundShape, pools: KVPool) -> Self:
        """Make buffers of padded requests only, on the pool's device."""
        buffers = Buffers(pools.req_to_token.device)
        lanes = buffers.like("lanes", _padded_lanes(shape))
        verify_input = buffers.like("verify_input", padding.padded_verify_input(shape))
        candidates = lanes.candidates
        allowed = (
            Allowed.empty(shape.bucket, shape.config.num_draft_tokens, shape.vocab_size) if shape.has_grammars else None
        )
        return cls(
            shape=shape,
            pools=pools,
            buffers=buffers,
            inlet=Inlet.of(shape, buffers),
            lanes=lanes,
            verify_input=replace(
                verify_input, candidates=replace(candidates, draft_prob=None), draft_prob=candidates.draft_prob
            ),
            extend_input=buffers.like("extend_input", padding.padded_extend_input(shape)),
            outlet=Outlet.of(shape, buffers),
            allowed=None if allowed is None else buffers.like("allowed", allowed),
            target_output=TargetOutput(torch.empty(0), torch.empty(0)),
        )

    @property
    def bucket(self) -> int:
        """Number of requests that the buffers hold."""
        return self.shape.bucket

    @property
    def batch(self) -> Batch:
        """The batch from which the round starts."""
        return self.inlet.batch

    @property
    def draft_input(self) -> DraftInput:
        """The draft input from which the round starts."""
        return self.inlet.draft_input

    @property
    def verdict(self) -> Verdict:
        """The round's verdict."""
        return self.outlet.verdict

    def advance(self, batch: Batch) -> Advance:
        """Copy this batch's round output, for the next round to start from."""
        left, raw = self.outlet.copy(batch, self.bucket)
        self.inlet.expect(left, raw)
        return left


def _padded_lanes(shape: RoundShape) -> Lanes:
    """Make lanes of padded requests, with the content that earlier steps would leave for a captured step."""
    lanes = Lanes.empty(shape.bucket, shape.hidden_size, shape.config, shape.dtype, "cpu", shape.vocab_size)
    for buffer in lanes.tables:
        buffer.zero_()
    lanes.candidates.parent_list.fill_(-1)  # the root's block, all that plain decoding has
    return lanes
