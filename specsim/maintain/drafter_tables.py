"""Tables of the page on drafters: what each one keeps, the combinations that engines allow, and measured acceptance."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from specsim.core.config import SpecConfig
from specsim.core.engine_options import GRAPHS, EngineOptions
from specsim.core.errors import InputError
from specsim.core.kinds import DEFAULT, KINDS, OWN, TESTED
from specsim.core.pair import AnyDrafter, Pair
from specsim.core.token_drafter import Proposal, TreeLimits
from specsim.core.verifiers import DEFAULT_VERIFIER, VERIFIERS, Verifier
from specsim.maintain.result_tables import markdown, prompts_of
from specsim.models.load import token_drafter
from specsim.models.shipped import TINY
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine

WITH_WEIGHTS = tuple(
    name
    for name, kind in TESTED.items()
    if kind.has_weights and kind.variant(name).differs_in in ("nothing", "tensors")
)
TREES = {1: "chain", 4: "tree"}  # by topk
ALLOWED_HEADINGS = ("drafter", "drafts", "verifiers", "graph modes")
PROTOCOL_HEADINGS = (
    "drafter",
    "state between rounds",
    "layers of draft KV",
    "bonus columns",
    "lookahead",
    "mask rows",
    "host or device",
)
REFUSED_HEADINGS = ("drafters", "refused with")
ACCEPTANCE_HEADINGS = ("drafter", "temperature", "prompts", "accept length", "without loops", "accepted by position")
STEPS = 3  # of the chains in the table of acceptance, and of all combinations


class YourDrafter:
    """A token drafter of a user, which proposes nothing."""

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        """Propose nothing."""
        return Proposal([], [], [])

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Keep nothing."""


class Combination(NamedTuple):
    """One drafter under one setting."""

    drafter: str
    verifier: Verifier
    topk: int
    graph: str
    num_steps: int = STEPS
    release: str = "finish"


WITHOUT_WEIGHTS: dict[str, AnyDrafter | None] = {
    **{name: token_drafter(name) for name, kind in KINDS.items() if not kind.has_weights},
    OWN.title: YourDrafter(),
    "none": None,
}
DRAFTERS = (*WITH_WEIGHTS, *WITHOUT_WEIGHTS)
COMBINATIONS = tuple(
    Combination(drafter, verifier, topk, graph, 0 if drafter == "none" else STEPS)
    for drafter, topk, verifier, graph in product(DRAFTERS, TREES, VERIFIERS, GRAPHS)
)
# Refusals of other settings than those of the table: more steps than modules, pages that move, no drafter.
OTHERS = (
    *(
        Combination(name, DEFAULT_VERIFIER, 1, "eager", num_steps=STEPS + 1)
        for name, kind in KINDS.items()
        if kind.drafts == "modules"
    ),
    *(Combination(drafter, DEFAULT_VERIFIER, 1, "round", release="round") for drafter in DRAFTERS[:-1]),
    Combination("none", DEFAULT_VERIFIER, 1, "eager", num_steps=STEPS),
)


def make_pairs() -> dict[str, Pair]:
    """Make a tiny pair for every kind of drafter."""
    pairs = {kind: synthetic_pair(kind) for kind in WITH_WEIGHTS}
    return pairs | {kind: pairs[DEFAULT].with_drafter(drafter) for kind, drafter in WITHOUT_WEIGHTS.items()}


def protocol(_: Path | None = None) -> str:
    """Make the table of what a round reads of every drafter, from engines of tiny pairs."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for kind, pair in make_pairs().items():
        found = {_protocol_cells(pair, 0 if kind == "none" else STEPS, topk): name for topk, name in _widths(kind)}
        for cells, name in found.items():
            rows[cells].append(kind if len(found) == 1 else f"{kind}, {name}")
    table = markdown(PROTOCOL_HEADINGS, ((", ".join(kinds), *cells) for cells, kinds in rows.items()))
    return "\n".join(["", *table, ""]) + "\n"


def _widths(kind: str) -> Iterable[tuple[int, str]]:
    return [(1, TREES[1])] if kind == "none" else TREES.items()


def _protocol_cells(pair: Pair, num_steps: int, topk: int) -> tuple[str, ...]:
    drafter = load_engine(pair, SpecConfig(topk, num_steps), EngineOptions("fast")).drafter
    layout = drafter.kv_layout
    place = "host" if drafter.runs_on_host else "device"
    numbers = (layout.num_layers if layout else 0, drafter.bonus_columns, drafter.lookahead, drafter.num_mask_rows)
    return f"`{type(drafter.idle()).__name__}`", *map(str, numbers), place


def refusal(combination: Combination, pair: Pair, impl: Any = "fast") -> InputError | None:
    """Make an engine of the combination, and return the error where it is refused."""
    _, verifier, topk, graph, num_steps, release = combination
    try:
        config = SpecConfig(topk, num_steps, verifier=verifier, release=release)  # pyright: ignore[reportArgumentType]
        load_engine(pair, config, EngineOptions(impl, graph=graph))  # pyright: ignore[reportArgumentType]
    except InputError as error:
        return error
    return None


def combinations(_: Path | None = None) -> str:
    """Make two tables: what each drafter runs with, and the errors of all other combinations."""
    pairs = make_pairs()
    errors = {each: refusal(each, pairs[each.drafter]) for each in (*COMBINATIONS, *OTHERS)}
    allowed = markdown(ALLOWED_HEADINGS, allowed_rows([each for each in COMBINATIONS if errors[each] is None]))
    return "\n".join(["", *allowed, "", *markdown(REFUSED_HEADINGS, refused_rows(errors)), ""]) + "\n"


def allowed_rows(allowed: Iterable[Combination]) -> Iterator[tuple[str, ...]]:
    """List drafters, chain or tree, verifiers and graph modes, together where they are the same."""
    graphs: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for each in allowed:
        graphs[each.drafter, each.topk, each.verifier].append(each.graph)
    verifiers: dict[tuple[str, int, tuple[str, ...]], list[str]] = defaultdict(list)
    for (drafter, topk, verifier), modes in graphs.items():
        verifiers[drafter, topk, tuple(modes)].append(verifier)
    drafters: dict[tuple[int, tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for (drafter, topk, modes), names in verifiers.items():
        drafters[topk, modes, tuple(names)].append(drafter)
    for (topk, modes, names), kinds in drafters.items():
        yield ", ".join(kinds), "no drafts" if kinds == ["none"] else TREES[topk], ", ".join(names), ", ".join(modes)


def refused_rows(errors: Mapping[Combination, InputError | None]) -> Iterator[tuple[str, str]]:
    """List the errors, with the drafters that meet each one; those that differ only in the value are one row."""
    kinds: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    sentences: dict[tuple[str, str], str] = {}
    for combination, error in errors.items():
        if error is not None:
            kinds[error.name, error.allowed][combination.drafter] = None
            sentences.setdefault((error.name, error.allowed), str(error))
    drafting = DRAFTERS[:-1]
    for key, found in kinds.items():
        yield "all that draft" if tuple(found) == drafting else ", ".join(found), sentences[key]


def acceptance(_: Path | None = None, file: Path = TINY / "acceptance.json") -> str:
    """Make the table of the shipped drafters' chains from the kept result of `specsim accept`."""
    study = json.loads(file.read_text(encoding="utf-8"))
    rows = [row for row in study["measurements"] if _is_shown(row["setting"]["config"])]
    table = markdown(ACCEPTANCE_HEADINGS, map(_acceptance_cells, rows))
    counts = f"{study['num_prompts']} held-out prompts, {study['max_new_tokens']} new tokens each"
    if study.get("num_edits"):
        counts += f"; {study['num_edits']} edits, prompts that end within a copy of an excerpt with one name changed"
    return "\n".join(["", *table, "", f"Chains of {STEPS} drafts on {counts}.", ""]) + "\n"


def _is_shown(config: Mapping[str, Any]) -> bool:
    return config["topk"] == 1 and config["num_steps"] == STEPS


def _acceptance_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    everything = row["everything"]
    rates = ", ".join(f"{rate:.2f}" for rate in everything["accepted_by_position"])
    lengths = [f"{row[part]['accept_length']:.2f}" if row.get(part) else "" for part in ("everything", "fresh")]
    setting = row["setting"]
    return setting["drafter"], f"{setting['temperature']:g}", prompts_of(setting), *lengths, rates
