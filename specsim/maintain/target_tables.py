"""Table of the page on drafters: targets, drafters, graph modes and number formats of KV that engines allow."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from specsim.core import target
from specsim.core.config import SpecConfig
from specsim.core.engine_options import GRAPHS, EngineOptions
from specsim.core.errors import InputError
from specsim.core.kinds import DEFAULT
from specsim.core.kv_buffer import KV_DTYPES, KVDtype
from specsim.core.pair import Pair
from specsim.maintain.drafter_tables import DRAFTERS, STEPS, WITH_WEIGHTS, WITHOUT_WEIGHTS
from specsim.maintain.result_tables import markdown
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine

ALLOWED_HEADINGS = ("target", "drafter", "graph modes", "KV of target and drafter")
REFUSED_HEADINGS = ("target", "drafters", "refused with")


class TargetCombination(NamedTuple):
    """One drafter on one target family, in one graph mode, with KV in these number formats."""

    family: str
    drafter: str
    graph: str
    kv_dtype: KVDtype
    draft_kv_dtype: KVDtype


COMBINATIONS = tuple(
    TargetCombination(*each) for each in product(target.FAMILIES, DRAFTERS, GRAPHS, KV_DTYPES, KV_DTYPES)
)


def make_pair(family: str, drafter: str) -> Pair:
    """Make a tiny pair of this family and kind of drafter."""
    if drafter in WITH_WEIGHTS:
        return synthetic_pair(drafter, family)
    return synthetic_pair(DEFAULT, family).with_drafter(WITHOUT_WEIGHTS[drafter])


def refusal(combination: TargetCombination, pair: Pair, impl: str = "fast") -> InputError | None:
    """Make an engine of a chain, and return the error where it is refused."""
    _, drafter, graph, kv_dtype, draft_kv_dtype = combination
    options = EngineOptions(impl, graph=graph, kv_dtype=kv_dtype, draft_kv_dtype=draft_kv_dtype)  # pyright: ignore[reportArgumentType]  # names from lists
    try:
        load_engine(pair, SpecConfig(1, 0 if drafter == "none" else STEPS), options)
    except InputError as error:
        return error
    return None


def refusals(combinations: Iterable[TargetCombination] = COMBINATIONS) -> dict[TargetCombination, InputError | None]:
    """Try every combination."""
    pairs: dict[tuple[str, str], Pair] = {}
    found = {}
    for each in combinations:
        if (each.family, each.drafter) not in pairs:
            pairs[each.family, each.drafter] = make_pair(each.family, each.drafter)
        found[each] = refusal(each, pairs[each.family, each.drafter])
    return found


def targets(_: Path | None = None) -> str:
    """Make two tables: what runs with each target, and the errors of all other combinations."""
    errors = refusals()
    allowed = markdown(ALLOWED_HEADINGS, allowed_rows([each for each, error in errors.items() if error is None]))
    return "\n".join(["", *allowed, "", *markdown(REFUSED_HEADINGS, refused_rows(errors)), ""]) + "\n"


def allowed_rows(allowed: Iterable[TargetCombination]) -> Iterator[tuple[str, ...]]:
    """List targets, drafters, graph modes and number formats, together where they are the same."""
    formats: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for each in allowed:
        formats[each.family, each.drafter, each.graph].append(f"{each.kv_dtype} and {each.draft_kv_dtype}")
    graphs: dict[tuple[str, str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (family, drafter, graph), names in formats.items():
        graphs[family, drafter, tuple(names)].append(graph)
    families: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for (family, drafter, names), modes in graphs.items():
        families[drafter, tuple(modes), names].append(family)
    drafters: dict[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for (drafter, modes, names), found in families.items():
        drafters[tuple(found), modes, names].append(drafter)
    for (found, modes, names), kinds in drafters.items():
        yield _listed(found), ", ".join(kinds), ", ".join(modes), "; ".join(names)


def _listed(families: Iterable[str]) -> str:
    return "all" if tuple(families) == target.FAMILIES else ", ".join(families)


def refused_rows(errors: dict[TargetCombination, InputError | None]) -> Iterator[tuple[str, ...]]:
    """List the errors, with the targets and drafters that meet each one."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for each, error in errors.items():
        if error is not None:
            families, drafters = found.setdefault(str(error), ({}, {}))
            families[each.family] = None
            drafters[each.drafter] = None
    for sentence, (families, drafters) in found.items():
        yield _listed(families), ", ".join(drafters), sentence
