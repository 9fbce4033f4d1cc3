"""Tables of the page on drafters: protocol, combinations that engines allow, and acceptance of the shipped ones."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from specsim.core import target
from specsim.core.config import SpecConfig
from specsim.core.engine_options import GRAPHS, EngineOptions
from specsim.core.errors import InputError
from specsim.core.kinds import DEFAULT, KINDS, OWN, TESTED
from specsim.core.kv_buffer import KV_DTYPES, KVDtype
from specsim.core.pair import AnyDrafter, Pair
from specsim.core.token_drafter import Proposal, TreeLimits
from specsim.core.verifiers import DEFAULT_VERIFIER, VERIFIERS, Verifier
from specsim.maintain.page import Column, markdown, table
from specsim.maintain.shipped_pair.card import prompts_of
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
STEPS = 3  # of the chains in the table of acceptance, and of all combinations


class YourDrafter:
    """A token drafter of a user, which proposes nothing."""

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        """Propose nothing."""
        return Proposal([], [], [])

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Keep nothing."""


class Combination(NamedTuple):
    """One drafter under one setting, on a target of one family."""

    drafter: str
    verifier: Verifier
    topk: int
    graph: str
    num_steps: int = STEPS
    release: str = "finish"
    family: str = target.FAMILIES[0]
    kv_dtype: KVDtype = "model"
    draft_kv_dtype: KVDtype = "model"


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
TARGET_COMBINATIONS = tuple(
    Combination(drafter, DEFAULT_VERIFIER, 1, graph, 0 if drafter == "none" else STEPS, "finish", family, *formats)
    for family, drafter, graph, *formats in product(target.FAMILIES, DRAFTERS, GRAPHS, KV_DTYPES, KV_DTYPES)
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


@cache
def make_pair(drafter: str, family: str = target.FAMILIES[0]) -> Pair:
    """Make a tiny pair of a kind of drafter and a family of targets."""
    if drafter in WITH_WEIGHTS:
        return synthetic_pair(drafter, family)
    return make_pair(DEFAULT, family).with_drafter(WITHOUT_WEIGHTS[drafter])


def protocol() -> str:
    """Make the table of what a round reads of every drafter, from engines of tiny pairs."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for kind in DRAFTERS:
        num_steps = 0 if kind == "none" else STEPS
        names = {_protocol_cells(make_pair(kind), num_steps, topk): name for topk, name in _widths(kind)}
        for cells, name in names.items():
            rows[cells].append(kind if len(names) == 1 else f"{kind}, {name}")
    return "\n".join(markdown(PROTOCOL_HEADINGS, ((", ".join(kinds), *cells) for cells, kinds in rows.items())))


PROTOCOL_HEADINGS = (
    *("drafter", "state between rounds", "layers of draft KV", "bonus columns", "lookahead", "mask rows"),
    "host or device",
)


def _widths(kind: str) -> Iterable[tuple[int, str]]:
    return [(1, TREES[1])] if kind == "none" else TREES.items()


def _protocol_cells(pair: Pair, num_steps: int, topk: int) -> tuple[str, ...]:
    drafter = load_engine(pair, SpecConfig(topk, num_steps), EngineOptions("fast")).drafter
    layout = drafter.kv_layout
    device = "host" if drafter.runs_on_host else "device"
    numbers = (layout.num_layers if layout else 0, drafter.bonus_columns, drafter.lookahead, drafter.num_mask_rows)
    return f"`{type(drafter.idle()).__name__}`", *map(str, numbers), device


def refusal(combination: Combination, pair: Pair | None = None, impl: str = "fast") -> InputError | None:
    """Make an engine of the combination, of a tiny pair unless given, and return the error where it is refused."""
    drafter, verifier, topk, graph, num_steps, release, family, kv_dtype, draft_kv_dtype = combination
    pair = pair or make_pair(drafter, family)
    try:
        config = SpecConfig(topk, num_steps, verifier=verifier, release=release)  # pyright: ignore[reportArgumentType]
        options = EngineOptions(impl, graph=graph, kv_dtype=kv_dtype, draft_kv_dtype=draft_kv_dtype)  # pyright: ignore[reportArgumentType]
        load_engine(pair, config, options)
    except InputError as error:
        return error
    return None


def combinations() -> str:
    """Make two tables: what each drafter runs with, and the errors of all other combinations."""
    errors = {combination: refusal(combination) for combination in (*COMBINATIONS, *OTHERS)}
    allowed = allowed_rows(combination for combination in COMBINATIONS if errors[combination] is None)
    refused = table(REFUSED_COLUMNS[1:], refused_rows(errors))
    return "\n".join([*markdown(("drafter", "drafts", "verifiers", "graph modes"), allowed), "", *refused])


def targets() -> str:
    """Make two tables: what runs with each target, and the errors of all other combinations."""
    errors = {combination: refusal(combination) for combination in TARGET_COMBINATIONS}
    allowed = target_rows(combination for combination, error in errors.items() if error is None)
    headings = ("target", "drafter", "graph modes", "KV of target and drafter")
    return "\n".join([*markdown(headings, allowed), "", *table(REFUSED_COLUMNS, refused_rows(errors))])


def collapsed(rows: Iterable[Sequence[Any]], columns: Iterable[int]) -> list[tuple[tuple[Any, ...], ...]]:
    """Merge rows that differ in one column only, for these columns in turn; a cell lists its values."""
    merged = [tuple((value,) for value in row) for row in rows]
    for column in columns:
        values: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        for row in merged:
            values[(*row[:column], *row[column + 1 :])] += row[column]
        merged = [(*others[:column], tuple(cell), *others[column:]) for others, cell in values.items()]
    return merged


def allowed_rows(allowed: Iterable[Combination]) -> Iterator[tuple[str, ...]]:
    """List drafters, chain or tree, verifiers and graph modes, together where they are the same."""
    rows = [combination[:4] for combination in allowed]
    for kinds, verifiers, (topk,), modes in collapsed(rows, (3, 1, 0)):
        drafts = "no drafts" if kinds == ("none",) else TREES[topk]
        yield ", ".join(kinds), drafts, ", ".join(verifiers), ", ".join(modes)


def target_rows(allowed: Iterable[Combination]) -> Iterator[tuple[str, ...]]:
    """List targets, drafters, graph modes and number formats, together where they are the same."""
    rows = [
        (family, drafter, graph, f"{kv_dtype} and {draft_kv_dtype}")
        for drafter, _, _, graph, _, _, family, kv_dtype, draft_kv_dtype in allowed
    ]
    for families, kinds, modes, formats in collapsed(rows, (3, 2, 0, 1)):
        yield _families(families), ", ".join(kinds), ", ".join(modes), "; ".join(formats)


def _families(names: Iterable[str]) -> str:
    return "all" if tuple(names) == target.FAMILIES else ", ".join(names)


class Refusal(NamedTuple):
    """An error, and the combinations that meet it; errors that differ only in the value are one."""

    sentence: str
    combinations: list[Combination]

    @property
    def families(self) -> str:
        """Targets of the combinations."""
        return _families(dict.fromkeys(combination.family for combination in self.combinations))

    @property
    def drafters(self) -> str:
        """Drafters of the combinations."""
        drafters = tuple(dict.fromkeys(combination.drafter for combination in self.combinations))
        return "all that draft" if drafters == DRAFTERS[:-1] else ", ".join(drafters)


REFUSED_COLUMNS = (
    Column("target", lambda refused: refused.families),
    Column("drafters", lambda refused: refused.drafters),
    Column("refused with", lambda refused: refused.sentence),
)


def refused_rows(errors: Mapping[Combination, InputError | None]) -> Iterable[Refusal]:
    """List the errors with the combinations that meet each one."""
    refused: dict[tuple[str, str], Refusal] = {}
    for combination, error in errors.items():
        if error is not None:
            row = refused.setdefault((error.name, error.allowed), Refusal(str(error), []))
            row.combinations.append(combination)
    return refused.values()


def acceptance(file: Path = TINY / "acceptance.json") -> str:
    """Make the table of the shipped drafters' chains from the kept result of `specsim accept`."""
    study = json.loads(file.read_text(encoding="utf-8"))
    rows = [row for row in study["measurements"] if _is_chain_of_steps(row["setting"]["config"])]
    counts = f"{study['num_prompts']} held-out prompts, {study['max_new_tokens']} new tokens each"
    if study.get("num_edits"):
        counts += f"; {study['num_edits']} edits, prompts that end within a copy of an excerpt with one name changed"
    return "\n".join([*table(ACCEPTANCE_COLUMNS, rows), "", f"Chains of {STEPS} drafts on {counts}."])


def _is_chain_of_steps(config: Mapping[str, Any]) -> bool:
    return config["topk"] == 1 and config["num_steps"] == STEPS


ACCEPTANCE_COLUMNS = (
    Column("drafter", lambda row: row["setting"]["drafter"]),
    Column("temperature", lambda row: row["setting"]["temperature"], "g"),
    Column("prompts", lambda row: prompts_of(row["setting"])),
    Column("accept length", lambda row: row["everything"]["accept_length"], ".2f"),
    Column("without loops", lambda row: row["fresh"] and row["fresh"]["accept_length"], ".2f"),
    Column(
        "accepted by position",
        lambda row: ", ".join(f"{rate:.2f}" for rate in row["everything"]["accepted_by_position"]),
    ),
)
