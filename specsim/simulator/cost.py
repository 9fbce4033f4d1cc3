"""Seconds of forwards and rounds: bytes over bandwidth, operations over rate, launches, exchanges, the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.core.limits import GpuCount
from specsim.simulator.bounds import lengths, share
from specsim.simulator.drafter import Drafter
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.forward import Forward, padded
from specsim.simulator.hardware import Hardware
from specsim.simulator.model import Model

MOST_PARTS = 2**16  # most cached results of a cost model
_PLAIN = SpecConfig.plain()


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one round by part."""

    draft: float
    verify: float
    extend: float
    host: float  # host work that the device waits for

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.extend + self.host


class ColumnSlope(NamedTuple):
    """Seconds that layers of one window add per column they read."""

    window: int | None
    beyond: float  # columns read in addition to the context
    seconds: float


@dataclass(frozen=True, slots=True)
class RoundPart:
    """A phase of a round at one batch size; slopes are the same at every size."""

    seconds: float = 0.0  # without reading columns
    slopes: tuple[ColumnSlope, ...] = ()
    launching: float = 0.0  # least seconds of the phase

    def at(self, contexts: Sequence[int] | np.ndarray, total: float) -> float:
        seconds = self.seconds
        for window, beyond, slope in self.slopes:
            if window is None:
                columns = total + beyond * len(contexts)
            else:
                columns = np.minimum(np.add(contexts, beyond), window).sum()
            seconds += slope * columns
        return max(seconds, self.launching)


class RoundParts(NamedTuple):
    """The phases of a round at one batch size."""

    draft: RoundPart
    verify: RoundPart
    extend: RoundPart


@check_arguments
@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of prefills and rounds of a target and a drafter on `tensor_parallel` GPUs.

    A batch is padded to the next bucket; beyond the last bucket kernels are launched one by one.
    """

    hardware: Hardware
    model: Model
    drafter: Drafter | None = None  # None with a config that drafts: prompt lookup, which takes host time only
    efficiency: Efficiency = field(default_factory=Efficiency)
    tensor_parallel: GpuCount = 1
    schedule: Literal["sync", "overlap"] = "overlap"  # sync: the device waits for the host; overlap: the longer counts
    buckets: tuple[int, ...] | None = None  # batch sizes of captured graphs, ascending; (): no graph; None: all sizes
    draft_graph: bool = True  # whether drafting is in graphs too
    dtype: Literal["bfloat16", "float16"] = "bfloat16"  # of activations, and of products with weights of 16 bits
    _parts: dict[tuple, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.buckets is not None:
            sizes = tuple(self.buckets)
            if min(sizes, default=1) < 1 or sorted(set(sizes)) != list(sizes):
                raise InputError("buckets", self.buckets, "ascending batch sizes of at least 1")
        self.hardware.flops(self.dtype)

    def round(self, contexts: np.ndarray, config: SpecConfig) -> float:
        """Compute the seconds of one round of requests with these committed lengths [B]; plain: one decode step."""
        return self.phases(contexts, config).total

    def phases(self, contexts: np.ndarray, config: SpecConfig) -> Phases:
        """Compute the seconds of the same round by part."""
        contexts = lengths("contexts", contexts)
        if not len(contexts):
            return Phases(0.0, 0.0, 0.0, 0.0)
        parts = self.parts(len(contexts), config)
        draft, verify, extend = self._device_seconds(parts, contexts)
        return Phases(draft, verify, extend, self._exposed(len(contexts), draft + verify + extend, config))

    def seconds_of(self, parts: RoundParts, contexts: Sequence[int], config: SpecConfig) -> float:
        """Compute the seconds of a round from the parts of its batch size, without a check of the lengths."""
        draft, verify, extend = self._device_seconds(parts, contexts)
        device = draft + verify + extend
        return device + self._exposed(len(contexts), device, config)

    def _device_seconds(self, parts: RoundParts, contexts: Sequence[int] | np.ndarray) -> tuple[float, float, float]:
        total = _sum(contexts)
        verify = parts.verify.at(contexts, total) + self.efficiency.filters
        return parts.draft.at(contexts, total), verify, parts.extend.at(contexts, total)

    def parts(self, size: int, config: SpecConfig) -> RoundParts:
        """Compute the phases of a round of `size` requests, before their committed lengths are known."""
        return self._cached((size, config), lambda: self._round_parts(size, config))

    def exchanges(self, size: int, config: SpecConfig) -> float:
        """Compute the seconds of a round of `size` requests that its forwards spend on exchanges between GPUs.

        They are part of `round`.
        """
        rows, _ = padded(size, self.buckets)
        seconds = self._forward(self.model).exchanges(rows * config.num_draft_tokens)
        if config.is_plain or self.drafter is None:
            return seconds
        drafting = self._forward(self.drafter.model)
        row_counts = self.drafter.rows(config)
        seconds += self.drafter.forwards(config.num_steps) * drafting.exchanges(rows * row_counts.draft)
        if self.drafter.is_feature and not self.drafter.is_block:
            seconds += drafting.exchanges(rows * row_counts.extend)
        return seconds

    def prefill(self, new_tokens: np.ndarray, contexts: np.ndarray) -> float:
        """Compute the seconds of a step that prefills new_tokens [B] after contexts [B], drafter and host included."""
        return self.mixed(new_tokens, contexts, np.zeros(0), _PLAIN)

    def mixed(self, new_tokens: np.ndarray, behind: np.ndarray, contexts: np.ndarray, config: SpecConfig) -> float:
        """Compute the seconds of a round of requests [B] whose forwards include chunks of other requests' prompts.

        new_tokens, behind: tokens of each chunk and those before it. Without chunks it is a round. With them no graph
        fits: kernels are launched one by one, and weights are read once for both.
        """
        new = lengths("new_tokens", new_tokens)
        behind = lengths("behind", behind)
        if len(behind) != len(new):
            raise InputError("behind", behind.tolist(), f"one number for each of {len(new)} chunks")
        return self.mixed_of(new, behind, lengths("contexts", contexts), config)

    def mixed_of(
        self, new_tokens: np.ndarray, behind: np.ndarray, contexts: Sequence[int] | np.ndarray, config: SpecConfig
    ) -> float:
        """Compute the same without a check of the lengths."""
        size = len(contexts)
        if not len(new_tokens):
            return self.round(np.array(contexts, dtype=np.int64), config)
        new = new_tokens.astype(float)
        behind = behind.astype(float)
        nodes = config.num_draft_tokens
        device = self._mixed_forward(self.model, new, behind, contexts, nodes, nodes) + self.efficiency.filters
        if self.drafter:
            row_counts = self.drafter.rows(config)
            none = config.is_plain or not self.drafter.is_feature
            rows, head_rows = (0, 0) if none else (row_counts.extend, row_counts.extend_head)
            if self.drafter.is_block:
                device += self._context(_sum(new) + size * rows, graph=False).at(contexts, 0.0)
            else:
                device += self._mixed_forward(self.drafter.model, new, behind, contexts, rows, head_rows)
        if size and self.drafter and not config.is_plain:
            device += self.parts(size, config).draft.at(contexts, _sum(contexts))
        return device + self._exposed(size + len(new), device, config if size else _PLAIN)

    @property
    def launches(self) -> int:
        """Number of kernels of one forward of the target."""
        return self._forward(self.model).kernels

    def kv_slots(self, memory_share: float = 0.9) -> int:
        """Count the tokens whose KV, with the drafter's, fits with the weights into this share of all GPUs' memory."""
        share("memory_share", memory_share)
        models = [self.model, *([self.drafter.model] if self.drafter else [])]
        room = memory_share * self.hardware.memory
        for model in models:
            room -= self._forward(model).weight_bytes
        slots = int(room // sum(self._forward(model).kv_bytes for model in models))
        if slots < 1:
            raise InputError("tensor_parallel", self.tensor_parallel, f"GPUs that hold {self.model.name} and some KV")
        return slots

    def host(self, config: SpecConfig) -> float:
        """Compute the seconds of the host per step, without those of its requests."""
        return self.efficiency.host + (0.0 if config.is_plain else self.efficiency.host_drafts)

    def _exposed(self, size: int, device: float, config: SpecConfig) -> float:
        host = self.host(config) + size * self.efficiency.host_request
        return max(0.0, host - device) if self.schedule == "overlap" else host

    def _mixed_forward(
        self,
        model: Model,
        new: np.ndarray,
        behind: np.ndarray,
        contexts: Sequence[int] | np.ndarray,
        rows: int,
        head_rows: int,
    ) -> float:
        """Compute one forward of chunks and of `rows` rows of each running request."""
        size = len(contexts)
        is_target = model is self.model
        forward, part, launching = self._cached((is_target, rows), lambda: self._running_part(model, rows))
        all_rows = size * rows + _sum(new)
        all_head_rows = size * head_rows + len(new)
        products = lambda: forward.products(all_rows, all_head_rows, entry=True)  # noqa: E731
        device = self._cached((is_target, all_rows, all_head_rows), products)
        attention = lambda: forward.chunk_attention(new, behind)  # noqa: E731
        device += self._cached((is_target, new.tobytes(), behind.tobytes()), attention)
        if size and rows:
            device += part.at(contexts, _sum(contexts))
        return max(device, launching)

    def _running_part(self, model: Model, rows: int) -> tuple[Forward, RoundPart, float]:
        """Make the forward of a step with prompts, the attention of `rows` rows of each request, and least seconds."""
        forward = self._forward(model, graph=False)
        return forward, RoundPart(0.0, _slopes(forward, rows, rows / 2)), forward.launching

    def _cached(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Return a cached result: a simulated server needs the same one again and again."""
        if key not in self._parts:
            if len(self._parts) >= MOST_PARTS:
                self._parts.clear()
            self._parts[key] = make()
        return self._parts[key]

    def _forward(self, model: Model, graph: bool = True) -> Forward:
        key = ("forward", model is self.model, graph)
        make = lambda: Forward(self.hardware, model, self.efficiency, self.tensor_parallel, self.dtype, graph)  # noqa: E731
        return self._cached(key, make)

    def _round_parts(self, size: int, config: SpecConfig) -> RoundParts:
        rows, graph = padded(size, self.buckets)
        nodes = config.num_draft_tokens
        verify = self._part(self._forward(self.model, graph), rows, nodes, nodes, nodes / 2)
        none = RoundPart()
        if config.is_plain or self.drafter is None:
            return RoundParts(none, verify, none)
        has_graph = graph and self.draft_graph
        drafting = self._forward(self.drafter.model, has_graph)
        forwards = self.drafter.forwards(config.num_steps)
        row_counts = self.drafter.rows(config)
        draft = (
            self._part(drafting, rows, row_counts.draft, row_counts.draft_head, row_counts.beyond, forwards)
            if forwards
            else none
        )
        between = sum(
            drafting.step(self.drafter.step_weights, rows * num_parents) for num_parents in self.drafter.parents(config)
        )
        between += self.drafter.steps(config.num_steps) * self.efficiency.draft_step
        draft = replace(draft, seconds=draft.seconds + between)
        if not self.drafter.is_feature:
            return RoundParts(draft, verify, none)
        if self.drafter.is_block:
            return RoundParts(draft, verify, self._context(rows * row_counts.extend, has_graph))
        extend = self._part(
            drafting, rows, row_counts.extend, row_counts.extend_head, (row_counts.extend - 1) / 2, entry=True
        )
        return RoundParts(draft, verify, extend)

    def _context(self, rows: float, graph: bool) -> RoundPart:
        """Compute the writing of a block drafter's context."""
        assert self.drafter is not None
        forward = self._forward(self.drafter.model, graph)
        launching = 0.0 if graph else forward.context_kernels * self.efficiency.launch
        return RoundPart(forward.context(rows), (), launching)

    def _part(
        self, forward: Forward, size: int, rows: int, head_rows: int, beyond: float, times: int = 1, entry: bool = False
    ) -> RoundPart:
        """Compute `times` forwards of a batch: `rows` of each request, `head_rows` of them with logits."""
        seconds = times * forward.products(size * rows, size * head_rows, entry)
        return RoundPart(seconds, _slopes(forward, rows, beyond, times), times * forward.launching)


def _sum(lengths: Sequence[int] | np.ndarray) -> float:
    return float(np.add.reduce(lengths) if isinstance(lengths, np.ndarray) else sum(lengths))


def _slopes(forward: Forward, rows: int, beyond: float, times: int = 1) -> tuple[ColumnSlope, ...]:
    return tuple(ColumnSlope(window, beyond, times * slope) for window, slope in forward.column_seconds(rows).items())
