"""Cells in which every kind of drafter meets target families, verifiers, graph modes and page sizes in pairs."""

from collections.abc import Callable, Mapping
from typing import Any

from specsim.core.config import VERIFIERS
from specsim.core.drafter import BLOCK_KINDS
from specsim.correctness.pairwise import pairwise

LOOKED_UP = ("ngram", "suffix")  # kinds whose drafts are not sampled
LATER_FAMILIES = ("qwen2", "gpt_oss", "qwen3_moe", "deepseek_v3")
ON_HOST = ("suffix",)  # kinds that no graph captures
LATENT = ("deepseek_v3",)  # families without KV heads, which no drafter on frozen KV can read
WITHOUT_KV = ("frozen-kv", *LOOKED_UP)  # kinds without KV of their own
KINDS = ("eagle3.1", "p-eagle", "mtp", "standalone", "standalone.tli", "frozen-kv", *BLOCK_KINDS, *LOOKED_UP)
DRAFTER_AXES: dict[str, list[Any]] = {
    "kind": list(KINDS),
    "num_draft_tokens": [8],
    "kv": ["model", "fp8", "fp8_target", "fp8_draft"],  # of setting.KV_FORMATS
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
_TREE = dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3)
# Drafts that are looked up: chains and trees with dead nodes, deep accepted paths, the length limit.
LOOKED_UP_CELLS = (
    *(
        each | {"kind": kind}
        for kind in LOOKED_UP
        for each in (
            dict(_TREE, topk=1, num_steps=5, graph="phase", idle=True),
            dict(_TREE, graph="phase", sampling="warm", threshold_acc=0.1),
            dict(_TREE, graph="step", release="round", extend="ragged", family="mistral", mode="free"),
            dict(_TREE, verifier="typical", sampling="warm", page_size=1),
            dict(_TREE, num_steps=5, num_draft_tokens=16, sampling="penalties", max_len="near", family="qwen3"),
        )
    ),
    dict(_TREE, topk=1, kind="ngram", graph="round", family="mistral", bucket=4),
    dict(_TREE, topk=1, num_steps=5, kind="ngram", graph="round", sampling="filtered", mode="free", page_size=16),
)
_CHAINS = ("rejection", "block", "gumbel")
_SAMPLED = (*_CHAINS, "multi_round")


def drafter_settings(is_included: Callable[[Mapping[str, Any]], bool] = lambda _: True) -> list[dict[str, Any]]:
    """List settings that cover every possible pair of values of the axes, among those that are included."""
    return pairwise(DRAFTER_AXES, lambda setting: is_possible(setting) and is_included(setting))


def is_possible(setting: Mapping[str, Any]) -> bool:
    """Check whether a partial setting has no values that exclude each other."""
    kind = setting.get("kind")
    verifier = setting.get("verifier")
    topk = setting.get("topk", 1)
    is_round = setting.get("graph") == "round"
    excluded = (
        is_round and setting.get("release") == "round",
        is_round and kind in ON_HOST,
        is_round and kind == "ngram" and topk > 1,
        kind in LOOKED_UP and verifier in _SAMPLED,
        kind == "frozen-kv" and setting.get("family") in LATENT,
        kind in WITHOUT_KV and setting.get("kv") in ("fp8", "fp8_draft"),
        verifier in _CHAINS and topk > 1,
    )
    return not any(excluded)
