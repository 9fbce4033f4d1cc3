"""Static buffers of a round: its inputs, the states between its phases, and its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, Self

import torch

from specsim.core.phases import (
    Advance,
    Batch,
    Candidates,
    DraftExtendInput,
    DraftInput,
    ExplicitCandidates,
    State,
    Verdict,
    VerifyInput,
)
from specsim.core.pool import KVPool
from specsim.fast.kv import Progress
from specsim.fast.runtime import padding
from specsim.fast.runtime.buffers import Block, Buffers, named
from specsim.fast.runtime.graph import Graph
from specsim.fast.runtime.padding import RoundShape
from specsim.fast.runtime.sections import Sections
from specsim.fast.runtime.states import fill
from specsim.fast.tree import proposed
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
    def of(cls, shape: RoundShape, draft_input: DraftInput, buffers: Buffers) -> Self:
        """Make buffers of padded requests only, with a copy of their draft input."""
        batch = padding.padded_batch(shape)
        block = buffers.block(named("draft_input", draft_input.tensors) | named("batch", Progress.of(batch)._asdict()))
        *entering, seq_lens, num_rounds = block.tensors.values()
        others = buffers.like("batch", replace(batch, seq_lens=None, num_rounds=None))
        batch = replace(others, seq_lens=seq_lens, num_rounds=num_rounds)
        return cls(batch, _refilled(draft_input, entering), block.raw)

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
    proposed_depth: torch.Tensor  # i32 [B], of the round's trees
    block: Block

    @classmethod
    def of(cls, shape: RoundShape, draft_input: DraftInput, buffers: Buffers) -> Self:
        """Make buffers of padded requests only, with a copy of their draft input."""
        block = buffers.block(
            named("next_draft_input", draft_input.tensors)
            | named("progress", Progress.of(padding.padded_batch(shape))._asdict())
            | named("verdict", padding.padded_verdict(shape).tensors)
            | {"proposed_depth": torch.zeros(shape.bucket, dtype=torch.int32)}
        )
        return cls(*_left(draft_input, list(block.tensors.values())), block)

    def copy(self, batch: Batch, bucket: int) -> tuple[Advance, torch.Tensor]:
        """Copy the output of a batch's round, and return the copy's memory too."""
        raw, tensors = self.block.copy(batch.size, bucket)
        draft_input, progress, verdict, proposed_depth = _left(self.draft_input, tensors)
        return Advance(verdict, draft_input, replace(batch, **progress._asdict()), proposed_depth), raw


def _left(like: DraftInput, tensors: Sequence[torch.Tensor]) -> tuple[DraftInput, Progress, Verdict, torch.Tensor]:
    """Name an outlet's tensors, with a draft input of the same type and fields as `like`."""
    *others, proposed_depth = tensors
    *entering, seq_lens, num_rounds = others[:-_VERDICT]
    verdict = Verdict(*others[-_VERDICT:])
    return _refilled(like, entering), Progress(seq_lens, num_rounds), verdict, proposed_depth


def _refilled(like: DraftInput, tensors: Sequence[torch.Tensor]) -> DraftInput:
    """Make a state like this one from its tensors, in their order."""
    return replace(like, **dict(zip(like.tensors, tensors, strict=True)))


class DraftBuffers(Protocol):
    """A State of static buffers that a draft phase fills, whatever else they hold."""

    @property
    def candidates(self) -> Candidates | ExplicitCandidates:
        """The candidates that the draft phase leaves."""
        ...


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
    draft_buffers: DraftBuffers  # of the drafter's own type
    verify_input: VerifyInput
    extend_input: DraftExtendInput  # S+1 rows a request in both modes of draft-extend
    outlet: Outlet
    allowed: Allowed | None  # tokens that grammars allow after every node, which the host writes before verify
    target_output: TargetOutput  # empty before the first forward
    reads_slices: bool = False  # whether rounds of the batch read few tokens of what ranks share; target_output has it
    recordings: dict[tuple[Sections, bool], Recording] = field(default_factory=dict)  # by sections and reads_slices

    @classmethod
    def of(cls, shape: RoundShape, pools: KVPool, draft_input: DraftInput, draft_buffers: State) -> Self:
        """Make buffers of padded requests only, on the pool's device.

        draft_input, draft_buffers: the drafter's, of padded requests.
        """
        buffers = Buffers(pools.req_to_token.device)
        drafting: Any = buffers.like("draft_buffers", draft_buffers)
        outlet = Outlet.of(shape, draft_input, buffers)
        verify_input = replace(padding.padded_verify_input(shape), proposed_depth=None)
        verify_input = buffers.like("verify_input", verify_input)
        allowed = (
            Allowed.empty(shape.bucket, shape.config.num_draft_tokens, shape.vocab_size) if shape.has_grammars else None
        )
        return cls(
            shape=shape,
            pools=pools,
            buffers=buffers,
            inlet=Inlet.of(shape, draft_input, buffers),
            draft_buffers=drafting,
            verify_input=replace(verify_input, **proposed(drafting.candidates), proposed_depth=outlet.proposed_depth),
            extend_input=buffers.like("extend_input", padding.padded_extend_input(shape)),
            outlet=outlet,
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
