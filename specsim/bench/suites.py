"""Suites of benchmarks: groups of rows, created on demand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specsim.bench import (
    adaptive,
    baselines,
    bookkeeping,
    end_to_end,
    experts,
    linears,
    persistent,
    rounds,
    scale,
    shipped_pair,
    simulated,
    tensor_parallel,
    throughput,
    tree_attention,
    vocabulary,
)
from specsim.bench.roofline import Peaks
from specsim.bench.row import BenchRow
from specsim.core.kinds import DEFAULT
from specsim.core.target import ModelConfig
from specsim.models.shapes import shape


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run of a suite."""

    suite: str
    shape: str = "llama-3-8b"
    only: str = ""  # part of the names of the groups to run
    quick: bool = False  # few settings of a grid
    full: bool = False  # all settings of a grid
    seconds: float | None = None  # after which no further row is begun; None: the suite's
    tensor_parallel: int = 1  # ranks, this process one of them

    @property
    def model(self) -> ModelConfig:
        return shape(self.shape).config


# Rows in a tuple were measured together, at the end of the group: none is left out because time is over.
Group = Callable[[Options, Peaks], Iterator[BenchRow | tuple[BenchRow, ...]]]


@dataclass(frozen=True, slots=True)
class Suite:
    """Groups of rows by name, and the seconds after which no further row is begun."""

    groups: dict[str, Group]
    seconds: float
    needs_gpu: bool = True
    needs_ranks: bool = False  # at least two


def _bookkeeping(run: Options, peaks: Peaks) -> Iterator[BenchRow]:
    yield from bookkeeping.tree_rows(peaks)
    yield from bookkeeping.bookkeeping_rows(run.model, 3 * run.model.hidden_size, peaks)


_KERNELS: dict[str, Group] = {
    "linears": lambda run, peaks: linears.linear_rows(run.model, peaks, run.quick),
    "bookkeeping": _bookkeeping,
    "vocabulary": lambda run, peaks: vocabulary.vocabulary_rows(run.model.vocab_size, peaks, run.quick),
    "attention": lambda run, peaks: tree_attention.attention_rows(peaks, run.quick),
}
_EXPERTS: dict[str, Group] = {"layers": lambda _, peaks: experts.expert_rows(peaks)}
_ROUND: dict[str, Group] = {
    "rounds": lambda run, peaks: rounds.round_rows(run.shape, peaks, run.quick),
    "forwards": lambda run, peaks: rounds.forward_rows(run.shape, peaks),
    "invariance": lambda run, _: rounds.invariance_rows(run.shape, run.quick),
    "modes": lambda _, __: shipped_pair.mode_rows(),
    "sameness": lambda run, _: shipped_pair.sameness_rows(run.quick),
    "launches": lambda run, _: rounds.launch_rows(run.shape),
}
_PERSISTENT: dict[str, Group] = {
    "rounds": lambda run, peaks: persistent.persistent_rows(run.shape, peaks, run.full, run.quick),
}
_SCALE: dict[str, Group] = {
    "plain": lambda run, peaks: scale.scale_rows(run.shape, scale.PLAIN, peaks, run.full, run.quick),
    DEFAULT: lambda run, peaks: scale.scale_rows(run.shape, scale.SPECULATIVE, peaks, run.full, run.quick),
}
_BASELINES: dict[str, Group] = {
    "shipped": lambda _, peaks: baselines.shipped_rows(peaks),
    "shape": lambda run, peaks: end_to_end.shaped_rows(run.shape, peaks),
    "attention": lambda _, peaks: baselines.attention_rows(peaks),
}
_ADAPTIVE: dict[str, Group] = {
    "loads": lambda run, _: adaptive.load_rows(run.shape, run.quick),
    "shipped": lambda run, _: adaptive.shipped_rows(run.quick),
}
_SERVING: dict[str, Group] = {
    "loads": lambda run, _: throughput.serving_rows(run.shape, run.quick),
    "prefill": lambda run, peaks: throughput.prefill_rows(run.shape, peaks),
}
_SIMULATOR: dict[str, Group] = {
    "loop": lambda run, _: simulated.loop_rows(run.quick),
    "scheduler": lambda _, __: simulated.scheduler_rows(),
}
_TENSOR_PARALLEL: dict[str, Group] = {
    "exchanges": lambda run, _: tensor_parallel.exchange_rows(run.tensor_parallel, run.quick),
    "rounds": lambda run, _: tensor_parallel.round_rows(run.shape, run.tensor_parallel, run.quick),
    "share": lambda run, _: tensor_parallel.share_rows(run.shape, run.tensor_parallel, run.quick),
}
SUITES = {
    "kernels": Suite(_KERNELS, 300),
    "experts": Suite(_EXPERTS, 60),
    "round": Suite(_ROUND, 400),
    "persistent": Suite(_PERSISTENT, 240),
    "scale": Suite(_SCALE, 240),
    "baselines": Suite(_BASELINES, 240),
    "adaptive": Suite(_ADAPTIVE, 200),
    "serving": Suite(_SERVING, 400),
    "simulator": Suite(_SIMULATOR, 240, needs_gpu=False),
    "tensor-parallel": Suite(_TENSOR_PARALLEL, 400, needs_ranks=True),
}
