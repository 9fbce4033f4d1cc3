"""Static buffers of a round: its inputs, the states between its phases, and its outputs, all of padded requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple, Protocol, Self

import torch

from specsim.core.config import SamplingParams, SpecConfig
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
from specsim.fast.kv import BatchProgress, empty_extend_input
from specsim.fast.runtime.buffers import Block, Buffers, fill, named, pad
from specsim.fast.runtime.graph import Graph
from specsim.fast.tree import empty_tree, proposed
from specsim.fast.verify import empty_verdict
from specsim.fast.vocabulary.penalties import Allowed


@dataclass(frozen=True, slots=True)
class RoundShape:
    """The sizes of a round's states."""

    bucket: int  # requests that the buffers hold
    config: SpecConfig
    vocab_size: int  # of the target
    num_features: int  # width of the target's features, F
    dtype: torch.dtype  # of hidden states
    has_grammars: bool = False

    @property
    def width(self) -> int:
        """Number of a request's rows in draft-extend and width of an accepted path, S + 1."""
        return self.config.num_steps + 1


def padded_batch(shape: RoundShape) -> Batch:
    """Make a batch of padded requests, with biases so that there is a buffer for them."""
    size = shape.bucket
    params = [SamplingParams(logit_bias={0: 0.0})] * size
    return Batch.of([0] * size, [-1] * size, [0] * size, params, shape.vocab_size)


def padded_verify_input(shape: RoundShape) -> VerifyInput:
    """Make the trees of padded requests."""
    return pad(empty_tree(shape.bucket, shape.config.num_draft_tokens, torch.device("cpu")))


def padded_verdict(shape: RoundShape) -> Verdict:
    """Make the verdict of padded requests, which accepts only a bonus token."""
    return pad(empty_verdict(shape.bucket, shape.config, torch.device("cpu")))


def padded_extend_input(shape: RoundShape) -> DraftExtendInput:
    """Make the draft-extend rows of padded requests, S+1 each, that write nothing."""
    rows = pad(empty_extend_input(shape.bucket, shape.width, torch.empty(0, shape.num_features, dtype=shape.dtype)))
    rows.row_starts.copy_(shape.width * torch.arange(shape.bucket + 1))
    return rows


class StaticInput:
    """The static batch and draft input from which a round starts.

    States are values, so a state that was copied last and is passed again is not copied. The output of one round
    becomes the next one's input in a single copy.
    """

    def __init__(self, batch: Batch, draft_input: DraftInput, raw: torch.Tensor) -> None:
        self.batch = batch
        self.draft_input = draft_input
        self._raw = raw  # memory of draft_input, then of the batch's progress, as that of a static output begins
        self._copied: dict[str, Any] = {}  # by path: the state or tensor that was copied last
        self._last_round: RoundResult | None = None

    @classmethod
    def of(cls, shape: RoundShape, draft_input: DraftInput, buffers: Buffers) -> Self:
        """Make buffers of padded requests only, with a copy of their draft input."""
        batch = padded_batch(shape)
        block = buffers.block(
            named("draft_input", draft_input.tensors) | named("batch", BatchProgress.of(batch)._asdict())
        )
        others = buffers.like("batch", replace(batch, seq_lens=None, num_rounds=None))
        batch = replace(others, **_part(block.tensors, "batch"))
        return cls(batch, replace(draft_input, **_part(block.tensors, "draft_input")), block.raw)

    def remember(self, result: "RoundResult") -> None:
        """Remember a round's result, which is likely to be the next round's input."""
        self._last_round = result

    def load(self, batch: Batch, draft_input: DraftInput | None = None) -> None:
        """Copy the states into the first rows, and pad the rest."""
        last = self._last_round
        is_copied = self._copied.get("draft_input") is draft_input
        if last is not None and last.advance.draft_input is draft_input and not is_copied:
            self._load_result(last)
        self._load("batch", self.batch, batch)
        if draft_input is not None:
            self._load("draft_input", self.draft_input, draft_input)

    def _load_result(self, result: "RoundResult") -> None:
        """Copy a round's draft input and progress, with which its memory begins, at once."""
        self._raw.copy_(result.raw[: len(self._raw)])
        draft_input = result.advance.draft_input
        self._copied |= {"draft_input": draft_input, "batch": None} | named("draft_input", draft_input.tensors)
        self._copied |= named("batch", BatchProgress.of(result.advance.batch)._asdict())

    def _load(self, path: str, static: Any, value: Any) -> None:
        if self._copied.get(path) is value:
            return
        self._copied[path] = None
        if isinstance(value, State):
            for field_ in fields(value):
                self._load(f"{path}.{field_.name}", getattr(static, field_.name), getattr(value, field_.name))
        elif value is not None:
            fill(static, value, path.rpartition(".")[2])
        self._copied[path] = value


class RoundResult(NamedTuple):
    """A copy of a round's output."""

    advance: Advance
    raw: torch.Tensor  # u8, memory of the copy, which begins with the next round's input


@dataclass(frozen=True, slots=True)
class StaticOutput:
    """The static output states of a round, in one block of memory that starts with the next round's input."""

    draft_input: DraftInput  # of the next round
    progress: BatchProgress  # after the round
    verdict: Verdict
    proposed_depth: torch.Tensor  # i32 [B], of the round's trees
    block: Block

    @classmethod
    def of(cls, shape: RoundShape, draft_input: DraftInput, buffers: Buffers) -> Self:
        """Make buffers of padded requests only, with a copy of their draft input."""
        block = buffers.block(
            named("next_draft_input", draft_input.tensors)
            | named("progress", BatchProgress.of(padded_batch(shape))._asdict())
            | named("verdict", padded_verdict(shape).tensors)
            | {"proposed_depth": torch.zeros(shape.bucket, dtype=torch.int32)}
        )
        tensors = block.tensors
        return cls(
            draft_input=replace(draft_input, **_part(tensors, "next_draft_input")),
            progress=BatchProgress(**_part(tensors, "progress")),
            verdict=Verdict(**_part(tensors, "verdict")),
            proposed_depth=tensors["proposed_depth"],
            block=block,
        )

    def copy(self, batch: Batch, bucket: int) -> RoundResult:
        """Copy the output of a batch's round."""
        raw, copies = self.block.copy(batch.size, bucket)
        tensors = dict(zip(self.block.tensors, copies, strict=True))
        draft_input = replace(self.draft_input, **_part(tensors, "next_draft_input"))
        after = replace(batch, **_part(tensors, "progress"))
        advance = Advance(Verdict(**_part(tensors, "verdict")), draft_input, after, tensors["proposed_depth"])
        return RoundResult(advance, raw)


def _part(tensors: Mapping[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
    """Select the tensors of one state of a block, by the names of its fields."""
    return {name: tensors[block_name] for name, block_name in _names(tuple(tensors), path)}


@cache  # the host's time of a round counts
def _names(names: tuple[str, ...], path: str) -> tuple[tuple[str, str], ...]:
    """List a state's fields, each with its name in the block."""
    prefix = f"{path}."
    return tuple((name.removeprefix(prefix), name) for name in names if name.startswith(prefix))


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
    input: StaticInput
    draft_buffers: DraftBuffers  # of the drafter's own type
    verify_input: VerifyInput
    extend_input: DraftExtendInput  # S+1 rows a request in both modes of draft-extend
    output: StaticOutput
    allowed: Allowed | None  # tokens that grammars allow after every node, which the host writes before verify
    target_output: TargetOutput  # empty before the first forward
    loaded_batch: Batch  # whose requests the round is of; they are the first ones of `batch`
    reads_slices: bool = False  # whether rounds of the batch read few tokens of what ranks share; target_output has it
    # By sections (specsim.fast.sections) and reads_slices.
    recordings: dict[tuple[tuple[Callable[..., None], ...], bool], Recording] = field(default_factory=dict)

    @classmethod
    def of(
        cls, shape: RoundShape, pools: KVPool, draft_input: DraftInput, draft_buffers: State, looks_up: bool = False
    ) -> Self:
        """Make buffers of padded requests only, on the pool's device.

        draft_input, draft_buffers: the drafter's, of padded requests. looks_up: whether drafts are looked up, too.
        """
        buffers = Buffers(pools.req_to_token.device)
        drafting: Any = buffers.like("draft_buffers", draft_buffers)
        looked_up = ExplicitCandidates.empty(shape.bucket, shape.config.num_candidates) if looks_up else None
        output = StaticOutput.of(shape, draft_input, buffers)
        verify_input = replace(padded_verify_input(shape), proposed_depth=None, looked_up=looked_up)
        verify_input = buffers.like("verify_input", verify_input)
        allowed = (
            Allowed.empty(shape.bucket, shape.config.num_draft_tokens, shape.vocab_size) if shape.has_grammars else None
        )
        static_input = StaticInput.of(shape, draft_input, buffers)
        return cls(
            shape=shape,
            pools=pools,
            buffers=buffers,
            input=static_input,
            draft_buffers=drafting,
            verify_input=replace(verify_input, **proposed(drafting.candidates), proposed_depth=output.proposed_depth),
            extend_input=buffers.like("extend_input", padded_extend_input(shape)),
            output=output,
            allowed=None if allowed is None else buffers.like("allowed", allowed),
            target_output=TargetOutput(torch.empty(0), torch.empty(0)),
            loaded_batch=static_input.batch,
        )

    @property
    def bucket(self) -> int:
        """Number of requests that the buffers hold."""
        return self.shape.bucket

    @property
    def batch(self) -> Batch:
        """The batch from which the round starts."""
        return self.input.batch

    @property
    def draft_input(self) -> DraftInput:
        """The draft input from which the round starts."""
        return self.input.draft_input

    @property
    def verdict(self) -> Verdict:
        """The round's verdict."""
        return self.output.verdict

    def load(self, batch: Batch, draft_input: DraftInput | None = None) -> None:
        """Load the states from which a round starts."""
        self.loaded_batch = batch
        self.input.load(batch, draft_input)

    def advance(self, batch: Batch) -> Advance:
        """Copy this batch's round output, for the next round to start from."""
        result = self.output.copy(batch, self.bucket)
        self.input.remember(result)
        return result.advance
