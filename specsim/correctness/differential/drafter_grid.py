"""Cells in which every kind of drafter meets target families, verifiers, graph modes and page sizes in pairs."""

from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

from specsim.core.kinds import KINDS as RECORDS
from specsim.core.kinds import TESTED
from specsim.core.verifiers import DEFAULT_VERIFIER, KIND_OF, LANES, VERIFIERS, Drafts
from specsim.correctness.differential.cell import AXES, KV_FORMATS, LATER_FAMILIES
from specsim.correctness.pairwise import pairwise


def variants(differs_in: str) -> list[str]:
    """Name the variants of all kinds that differ in this from their kinds."""
    kinds = reversed(tuple(RECORDS.values()))
    return [name for kind in kinds for name, variant in kind.variants.items() if variant.differs_in == differs_in]


LATENT = ("deepseek_v3",)  # families without KV heads, which no drafter can read that has no KV of its own
# All that the grid `pairwise` does not have, without modes: kinds that ranks can share come first.
_ORDERED = sorted(RECORDS.values(), key=lambda kind: (not kind.has_weights, not kind.parallel))
KINDS = tuple(
    name
    for kind in _ORDERED
    for name in (kind.name, *kind.variants)
    if name not in AXES["kind"] and kind.variant(name).differs_in != "mode"
)
MODES = variants("mode")
DRAFTER_AXES: dict[str, list[Any]] = {
    "kind": list(KINDS),
    "num_draft_tokens": [8],
    "kv": list(KV_FORMATS),
    "verifier": list(VERIFIERS),
    "family": ["llama", "qwen3", "mistral", *LATER_FAMILIES],
    "graph": ["round", "eager", "step", "phase"],
    "topk": [1, 2, 4],
    "num_steps": [3, 1, 2],
    "page_size": [4, 1, 16],
    "sampling": ["greedy", "warm", "filtered", "penalties"],
    "batch": [3, 1],
    "extend": ["fixed", "ragged"],
    "release": ["finish", "round"],
    "draft_kv": ["lane", "ancestor"],
    "mode": ["lockstep", "free"],
    "max_len": [None, "near"],
    "chunks": [1, 2],
}
WITHOUT_WEIGHTS = [name for name, kind in RECORDS.items() if not kind.has_weights]


def with_verifiers(drafts: Drafts, *settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give every verifier of such drafts, except the default one, the next of the settings."""
    names = [name for name in VERIFIERS if KIND_OF[name].drafts == drafts and name != DEFAULT_VERIFIER]
    return [{**setting, "verifier": name} for name, setting in zip(names, cycle(settings), strict=False)]


def with_lanes(*settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give every verifier of K sampled lanes, of each kind of drafts, the next of the settings."""
    return [setting for drafts in LANES for setting in with_verifiers(drafts, *settings)]


_TREE = dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3)
# Drafts that are looked up: chains and trees with dead nodes, deep accepted paths, the length limit.
LOOKED_UP_CELLS = (
    *(
        each | {"kind": kind}
        for kind in WITHOUT_WEIGHTS
        for each in (
            dict(_TREE, topk=1, num_steps=5, graph="phase", idle=True),
            dict(_TREE, graph="phase", sampling="warm", threshold_acc=0.1),
            dict(_TREE, graph="step", release="round", extend="ragged", family="mistral", mode="free"),
            *with_verifiers("best", dict(_TREE, sampling="warm", page_size=1)),
            dict(_TREE, num_steps=5, num_draft_tokens=16, sampling="penalties", max_len="near", family="qwen3"),
        )
    ),
    *(
        each | {"kind": kind, "topk": 1, "graph": "round"}
        for kind in WITHOUT_WEIGHTS
        if not RECORDS[kind].drafts_on_host(topk=1)
        for each in (
            dict(_TREE, family="mistral", bucket=4),
            dict(_TREE, num_steps=5, sampling="filtered", mode="free", page_size=16),
        )
    ),
)


def drafter_settings(is_included: Callable[[Mapping[str, Any]], bool] = lambda _: True) -> list[dict[str, Any]]:
    """List settings that cover every possible pair of values of the axes, among those that are included."""
    return pairwise(DRAFTER_AXES, lambda setting: is_possible(setting) and is_included(setting))


def is_possible(setting: Mapping[str, Any]) -> bool:
    """Check whether a partial setting has no values that exclude each other."""
    kind = TESTED.get(setting.get("kind", ""))
    drafts = KIND_OF[setting.get("verifier", DEFAULT_VERIFIER)].drafts
    topk = setting.get("topk", 1)
    is_round = setting.get("graph") == "round"
    excluded = (
        is_round and setting.get("release") == "round",
        kind and is_round and kind.drafts_on_host(topk),
        kind and not kind.can_sample and drafts != "best",
        kind and kind.kv == "target" and setting.get("family") in LATENT,
        kind and kind.kv != "own" and setting.get("kv") in ("fp8", "fp8_draft"),
        drafts == "sampled" and topk > 1,
    )
    return not any(excluded)
