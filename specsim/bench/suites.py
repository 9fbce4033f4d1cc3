"""Suites of benchmarks: the groups of rows that each has, made when they are asked for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specsim.bench.roofline import Ceilings
from specsim.bench.row import Row
from specsim.models.shapes import shape


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run. only: rows whose group's name holds this text; full: all points of a grid, quick: few."""

    suite: str
    shape: str = "llama-3-8b"
    only: str = ""
    quick: bool = False
    full: bool = False
    seconds: float | None = None


Group = Callable[[Options, Ceilings], Iterator[Row]]


def _linears(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.linears import linear_rows

    return linear_rows(shape(options.shape).config, ceilings, options.quick)


def _attention(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.tree_attention import attention_rows

    return attention_rows(ceilings, options.quick)


def _vocabulary(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.vocabulary import vocabulary_rows

    return vocabulary_rows(shape(options.shape).config.vocab_size, ceilings, options.quick)


def _bookkeeping(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.bookkeeping import bookkeeping_rows
    from specsim.bench.trees import tree_rows

    model = shape(options.shape).config
    yield from tree_rows(ceilings)
    yield from bookkeeping_rows(model, 3 * model.hidden_size, ceilings)


def _rounds(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.rounds import round_rows

    return round_rows(options.shape, ceilings, options.quick)


def _forwards(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.rounds import forward_rows

    return forward_rows(options.shape, ceilings)


def _invariance(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.rounds import invariance_rows

    return invariance_rows(options.shape, options.quick)


def _modes(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.modes import mode_rows

    return mode_rows()


def _sameness(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.determinism import sameness_rows

    return sameness_rows(options.quick)


def _launches(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.rounds import launch_rows

    return launch_rows(options.shape)


def _plain(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.scale import PLAIN, scale_rows

    return scale_rows(options.shape, PLAIN, ceilings, options.full, options.quick)


def _eagle3(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.scale import EAGLE3, scale_rows

    return scale_rows(options.shape, EAGLE3, ceilings, options.full, options.quick)


def _shipped(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.baselines import shipped_rows

    return shipped_rows(ceilings)


def _shaped(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.baselines import shaped_rows

    return shaped_rows(options.shape, ceilings)


def _attention_of_baselines(options: Options, ceilings: Ceilings) -> Iterator[Row]:
    from specsim.bench.baselines import attention_rows

    return attention_rows(ceilings)


@dataclass(frozen=True, slots=True)
class Suite:
    """Groups of rows by name, and the seconds after which no further row is begun."""

    groups: dict[str, Group]
    seconds: float


SUITES = {
    "kernels": Suite(
        {"linears": _linears, "bookkeeping": _bookkeeping, "vocabulary": _vocabulary, "attention": _attention}, 300
    ),
    "round": Suite(
        {
            "rounds": _rounds,
            "forwards": _forwards,
            "invariance": _invariance,
            "modes": _modes,
            "sameness": _sameness,
            "launches": _launches,
        },
        400,
    ),
    "scale": Suite({"plain": _plain, "eagle3": _eagle3}, 240),
    "baselines": Suite({"shipped": _shipped, "shape": _shaped, "attention": _attention_of_baselines}, 240),
}
