"""Kinds of drafters: one record each, which every folder reads instead of a list of names.

Functions and objects of other folders are named as MODULE:NAME and imported where they are used, so that this file
needs none of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """Everything that folders need to know of a kind of drafter.

    reference, fast: functions that make the drafter of an engine, with the parameters of `make_drafter` in
    specsim.reference.drafters and specsim.fast.drafters. oracle: a function of specsim.reference.oracle's Request,
    tokens, root and depth that grows the candidates.
    """

    name: str  # in commands, configs and files
    title: str  # in tables and pages
    reference: str
    fast: str
    oracle: str
    has_weights: bool = True
    can_sample: bool = True  # drafts can be drawn, with the distribution that verifiers of sampled drafts read
    # Rounds whose draft phase is host code in the fast implementation, which no graph captures.
    on_host: Literal["never", "trees", "always"] = "never"
    parallel: tuple[str, ...] = ()  # values of draft_parallel with which it runs where ranks share the target


_EITHER = ("sharded", "replicated")
_LOOKED_UP: Mapping[str, Any] = {
    "oracle": "specsim.reference.oracle_draft:look_up",
    "has_weights": False,
    "can_sample": False,
}

_RECORDS = (
    DrafterKind(
        "eagle3",
        "EAGLE-3",
        reference="specsim.reference.drafters.eagle3:make",
        fast="specsim.fast.drafters.eagle3:make",
        oracle="specsim.reference.oracle_eagle:draft_eagle3",
        parallel=_EITHER,
    ),
    DrafterKind(
        "eagle",
        "EAGLE",
        reference="specsim.reference.drafters.eagle:make",
        fast="specsim.fast.drafters.eagle:make",
        oracle="specsim.reference.oracle_eagle:draft_eagle",
        parallel=_EITHER,
    ),
    DrafterKind(
        "p-eagle",
        "P-EAGLE",
        reference="specsim.reference.drafters.p_eagle:make",
        fast="specsim.fast.drafters.p_eagle:make",
        oracle="specsim.reference.oracle_p_eagle:draft_p_eagle",
        parallel=_EITHER,
    ),
    DrafterKind(
        "mtp",
        "MTP",
        reference="specsim.reference.drafters.mtp:make",
        fast="specsim.fast.drafters.mtp:make",
        oracle="specsim.reference.oracle_mtp:draft_mtp",
        parallel=("sharded",),
    ),
    DrafterKind(
        "frozen-kv",
        "frozen KV",
        reference="specsim.reference.drafters.frozen_kv:make",
        fast="specsim.fast.drafters.frozen_kv:make",
        oracle="specsim.reference.oracle_frozen_kv:draft_frozen_kv",
    ),
    DrafterKind(
        "dflash",
        "DFlash",
        reference="specsim.reference.drafters.block:make",
        fast="specsim.fast.drafters.block:make",
        oracle="specsim.reference.oracle_block:draft_block",
    ),
    DrafterKind(
        "dspark",
        "DSpark",
        reference="specsim.reference.drafters.block:make",
        fast="specsim.fast.drafters.block:make",
        oracle="specsim.reference.oracle_block:draft_block",
    ),
    DrafterKind(
        "standalone",
        "standalone",
        reference="specsim.reference.drafters.standalone:make",
        fast="specsim.fast.drafters.standalone:make",
        oracle="specsim.reference.oracle_standalone:draft_standalone",
        parallel=("replicated",),
    ),
    DrafterKind(
        "ngram",
        "n-gram",
        reference="specsim.reference.drafters.ngram:make",
        fast="specsim.fast.drafters.ngram:make",
        on_host="trees",
        **_LOOKED_UP,
    ),
    DrafterKind(
        "suffix",
        "suffix",
        reference="specsim.reference.drafters.suffix:make",
        fast="specsim.fast.drafters.suffix:make",
        on_host="always",
        **_LOOKED_UP,
    ),
)
KINDS: Mapping[str, DrafterKind] = {kind.name: kind for kind in _RECORDS}
# A token drafter of a user.
OWN = DrafterKind(
    "own",
    "your own",
    reference="specsim.reference.drafters.host:make",
    fast="specsim.fast.drafters.host:make",
    on_host="always",
    **_LOOKED_UP,
)


def resolve(place: str) -> Any:
    """Import the object of a record, named as MODULE:NAME."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
