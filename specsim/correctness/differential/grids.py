"""Grids of cells: from a few that take seconds to every combination."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError
from specsim.core.kinds import KINDS as RECORDS
from specsim.core.kinds import TESTED
from specsim.correctness.differential.cell import AXES, CROSSED, DEFAULTS, ROUTED, Cell, cell_of, width
from specsim.correctness.differential.drafter_grid import (
    KINDS,
    LOOKED_UP_CELLS,
    MODES,
    WITHOUT_WEIGHTS,
    drafter_settings,
    is_possible,
    with_lanes,
    with_verifiers,
)
from specsim.correctness.pairwise import pairwise

WIDE = ("qwen2", "qwen3", "mistral")
GRIDS = ("quick", "pairwise", "drafters", "full")
QUICK = (
    dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3),
    dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, sampling="warm", kind="eagle3", graph="phase"),
    dict(
        topk=1, num_steps=5, page_size=16, sampling="warm", kind="eagle3", graph="step", mode="free", threshold_acc=0.1
    ),
    dict(topk=8, num_steps=2, num_draft_tokens=16, page_size=1, sampling="filtered", extend="ragged", graph="round"),
    dict(topk=2, num_steps=5, num_draft_tokens="most", page_size=2, sampling="biased", draft_kv="ancestor", batch=3),
    dict(topk=4, num_steps=2, num_draft_tokens="most", page_size=64, sampling="penalties", release="round"),
    dict(topk=4, num_steps=3, num_draft_tokens="most", page_size=4, batch=3, max_len="near", score="logprob"),
    dict(topk=4, num_steps=5, num_draft_tokens="most", page_size=16, family="twins", batch=3, graph="round"),
)
# The other verifiers: few requests each, in different graph modes.
SAMPLED = (
    *with_verifiers(
        "sampled",
        dict(topk=1, num_steps=2, page_size=4, sampling="warm", max_len="near", mode="free"),
        dict(topk=1, num_steps=2, page_size=4, batch=3, sampling="mixed", graph="round", idle=True),
        dict(topk=1, num_steps=2, page_size=4, sampling="filtered", graph="phase", kind="eagle3"),
    ),
    *with_lanes(dict(topk=2, num_steps=2, page_size=4, sampling="warm", graph="step", kind="eagle3")),
)
DEEP = {"sampling": "warm", "threshold_acc": 0.1, "num_steps": 5, "num_draft_tokens": "most"}
# Beyond the pairs: equal logits, deep accepted paths, plain decoding, mixed parameters.
SPECIAL = (
    *(dict(QUICK[7], kind=kind, graph=graph) for kind in ("eagle", "eagle3") for graph in ("eager", "phase")),
    *(
        dict(QUICK[0], topk=16, num_steps=5, num_draft_tokens="most", family="twins", mode=mode)
        for mode in AXES["mode"]
    ),
    QUICK[0] | DEEP | {"kind": "eagle3"},
    QUICK[0] | DEEP | {"topk": 2, "family": "noisy", "graph": "round"},
    dict(QUICK[0], topk=1, num_steps=0, graph="phase", sampling="mixed", idle=True),
    dict(QUICK[0], topk=1, num_steps=0, page_size=1, graph="round", mode="free"),
    dict(QUICK[0], sampling="mixed", graph="round", bucket=8, idle=True),
    dict(QUICK[0], sampling="mixed", graph="eager", bucket=3, extend="ragged", release="round", idle=True),
    *SAMPLED,
    *with_verifiers("best", dict(topk=2, num_steps=2, num_draft_tokens=5, page_size=4, sampling="warm")),
)
# Every drafter without cells of its kind alone: most keep other KV than EAGLE heads.
_OWN_KV_CHAINS = with_verifiers(
    "sampled",
    dict(topk=1, num_steps=3, batch=3, sampling="warm", family="mistral", graph="round", idle=True),
    dict(topk=1, num_steps=5, page_size=4, sampling="warm", release="round", graph="step", mode="free"),
    dict(topk=1, num_steps=2, page_size=16, sampling="filtered", family="qwen3", graph="round"),
)
OWN_KV = (
    dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3),
    _OWN_KV_CHAINS[0],
    dict(QUICK[0], page_size=16, family="qwen3", extend="ragged", release="round", graph="phase", chunks=2),
    dict(topk=4, num_steps=5, num_draft_tokens="most", page_size=4, batch=3, family="mistral", draft_kv="ancestor")
    | dict(score="logprob", max_len="near", mode="free"),
    *with_lanes(
        dict(topk=2, num_steps=3, page_size=4, batch=3, sampling="mixed", family="noisy", graph="step", max_len="near"),
    ),
    *_OWN_KV_CHAINS[1:],
    dict(topk=4, num_steps=3, num_draft_tokens=16, page_size=16, batch=3, sampling="warm", threshold_acc=0.1)
    | dict(family="noisy", graph="round", bucket=4, max_len="near"),
)


def _product(kind: str, num_steps: int, chains: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """List cells of a drafter whose draft phase makes the product of drafts that are finished before.

    chains: family, graph mode and sampling. num_steps: of the tree at the length limit.
    """
    trees = (
        dict(graph="phase", sampling="filtered", release="round", extend="ragged", chunks=2),
        dict(family="twins", graph="round", score="logprob", mode="free", page_size=1),
        dict(family="noisy", num_steps=num_steps, graph="step", max_len="near", chunks=2, idle=True),
    )
    chain = dict(topk=1, num_steps=3, page_size=4, batch=3, kind=kind)
    cells = [chain | dict(family=family, graph=graph, sampling=sampling) for family, graph, sampling in chains]
    return [*cells, *(QUICK[0] | tree | {"kind": kind} for tree in trees)]


def _verified(kind: str, **changes: Any) -> list[dict[str, Any]]:
    """List the cells of other verifiers, of drafts that are sampled."""
    return [setting | {"kind": kind} | changes for setting in SAMPLED]


# Modules of MTP, three in every pair, which write rows again.
MTP = (
    *_product(
        "mtp",
        2,
        (
            ("llama", "eager", "warm"),
            ("qwen3", "phase", "greedy"),
            ("mistral", "step", "greedy"),  # vllm#41162: a sliding window or latent KV, and more than two drafts
            ("mistral", "round", "warm"),
            ("gpt_oss", "step", "warm"),
            ("gpt_oss", "round", "greedy"),
            ("deepseek_v3", "step", "greedy"),
            ("deepseek_v3", "round", "warm"),
            ("noisy", "round", "penalties"),
        ),
    ),
    *_verified("mtp", num_steps=3),
    dict(QUICK[0], kind="mtp.one", graph="step"),
    *(  # vllm#41162 with one module, which runs once a draft step: its metadata is made again for each
        dict(topk=1, num_steps=3, page_size=4, batch=3, kind="mtp.one", family=family, graph=graph)
        for family in ("mistral", "deepseek_v3")
        for graph in ("step", "round")
    ),
    dict(QUICK[0], kind="mtp.parallel", graph="round", topk=1),
)
# P-EAGLE has mask rows, which end at the length limit.
P_EAGLE = (
    *_product(
        "p-eagle",
        5,
        (
            ("llama", "eager", "warm"),
            ("qwen3", "phase", "greedy"),
            ("mistral", "round", "warm"),
            ("gpt_oss", "step", "warm"),
            ("deepseek_v3", "round", "greedy"),
            ("noisy", "round", "penalties"),
        ),
    ),
    dict(topk=1, num_steps=5, page_size=4, kind="p-eagle", release="round", max_len="near", graph="phase"),
    QUICK[0] | DEEP | {"kind": "p-eagle", "graph": "round"},  # drafts of all depths are accepted
    DEEP
    | dict(topk=1, threshold_acc=1e-4, num_draft_tokens=6, page_size=4, kind="p-eagle", family="mistral")
    | dict(graph="step", mode="free"),
    *_verified("p-eagle", num_steps=3),
)
# Requests with their own draft steps, others in every round, down to none.
_OWN = dict(topk=2, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, sampling="warm", draft_steps="own")
OWN_STEPS = (
    *(_OWN | {"kind": kind, "graph": "phase"} for kind in ("eagle3", "mtp", "frozen-kv", "dspark", *WITHOUT_WEIGHTS)),
    dict(_OWN, kind="eagle", graph="step", topk=4, num_draft_tokens="most", draft_kv="ancestor", score="logprob"),
    dict(_OWN, kind="standalone", graph="round", sampling="greedy", max_len="near", bucket=4),
    *with_verifiers("best", dict(_OWN, kind="eagle3", graph="round")),
    *with_lanes(dict(_OWN, kind="dflash", graph="round")),
    *with_verifiers(
        "sampled",
        dict(_OWN, kind="mtp", topk=1, graph="phase", release="round", extend="ragged"),
        dict(_OWN, kind="dspark", topk=1, graph="round"),
        dict(_OWN, kind="p-eagle", topk=1, graph="round"),
    ),
)
_OTHERS = [name for name in KINDS if TESTED[name].has_weights and name not in ("eagle3.1", "mtp", "p-eagle")]
# Fewer tokens or a window, of drafters whose modes have other cells.
_LIMITED = [mode for mode in MODES if mode.endswith((".cut", ".window")) and TESTED[mode].name not in _OTHERS]
# Cells of drafters beyond their pairs.
DRAFTERS = (
    QUICK[0] | DEEP | {"kind": "eagle3.1", "graph": "round"},
    QUICK[1] | {"kind": "eagle3.1", "family": "noisy", "extend": "ragged"},
    dict(QUICK[0], kind="eagle3.1", family="qwen3", topk=1, num_steps=3, graph="step"),
    *(setting for kind in _OTHERS for each in OWN_KV if is_possible(setting := each | {"kind": kind})),
    *_verified("dspark"),  # with drafts that a low confidence ends
    *(each | {"kind": mode} for mode in MODES if TESTED[mode].name in _OTHERS for each in OWN_KV[1:4]),
    *(each | {"kind": mode} for mode in _LIMITED for each in OWN_KV[:3]),
    *MTP,
    *P_EAGLE,
    *OWN_STEPS,
    *LOOKED_UP_CELLS,
)
SHIPPED = (
    dict(QUICK[0], family="shipped", kind="eagle3", graph="round", mode="free", batch=1),
    dict(QUICK[0], family="shipped", kind="eagle", graph="phase", topk=1, num_steps=5, batch=1, sampling="warm"),
    *(
        dict(QUICK[0], family="shipped", kind=kind, graph="phase", mode="free", batch=1)
        for kind in KINDS
        if kind in RECORDS
    ),
)


@check_arguments
def grid(name: str, dtype: str = "float32", shared: str | None = None) -> tuple[Cell, ...]:
    """Make the cells of a grid by its name.

    In bfloat16 pairs have margins that its arithmetic keeps, and there are no experts and no KV in fp8, where a number
    that is rounded to the other side changes more than rounding does. The cover of all pairs in reverse leaves them out
    too, as the first cover has them.

    shared: draft_parallel of ranks; only cells of drafters that they can have in that way.
    """
    if name not in GRIDS:
        raise InputError("grid", name, " or ".join(GRIDS))

    def is_included(setting: Mapping[str, Any]) -> bool:
        return (dtype != "bfloat16" or is_smooth(setting)) and (shared is None or is_shareable(setting, shared))

    if name == "quick":
        settings: list[dict] = [*QUICK]
    elif name == "drafters":
        settings = [*drafter_settings(is_included), *DRAFTERS]
    else:
        backwards = {axis: values[::-1] for axis, values in AXES.items()}
        first = pairwise(AXES, lambda setting: is_valid(setting) and is_included(setting))
        second = pairwise(backwards, lambda setting: is_valid(setting) and is_smooth(setting) and is_included(setting))
        settings = [*first, *second]
        crossed = _crossed(settings) if name == "full" else []
        drafters = [*drafter_settings(is_included), *DRAFTERS] if name == "full" else []
        settings = [*crossed, *settings, *SPECIAL, *SHIPPED, *drafters]
    settings = [setting for setting in settings if is_included(setting)]
    if dtype == "bfloat16":
        settings = [setting | {"family": _wide(setting.get("family", DEFAULTS["family"]))} for setting in settings]
    return tuple({cell.id: cell for cell in map(cell_of, settings)}.values())


def _wide(family: str) -> str:
    """Name the family whose margins bfloat16 keeps; the shipped one has such margins, and equal logits stay equal."""
    return {"llama": "wide", "noisy": "wide"}.get(family, f"wide_{family}" if family in WIDE else family)


def is_smooth(setting: Mapping[str, Any]) -> bool:
    """Whether a small error stays small: no experts, which are chosen, and no KV in fp8."""
    return setting.get("family") not in ROUTED and setting.get("kv", "model") == "model"


def is_shareable(setting: Mapping[str, Any], draft_parallel: str) -> bool:
    """Whether ranks can share a pair whose drafter has slices on each, is whole on each, or has no weights."""
    return TESTED[setting.get("kind", DEFAULTS["kind"])].is_shareable(draft_parallel)


def is_valid(setting: Mapping[str, Any]) -> bool:
    """Whether a setting is possible: a chain has the narrowest tree, one graph for a round cannot move pages."""
    is_chain_or_tree = setting.get("topk") != 1 or setting.get("num_draft_tokens", 2) == 2
    return is_chain_or_tree and (setting.get("graph"), setting.get("release")) != ("round", "round")


def _crossed(covering: list[dict]) -> list[dict]:
    """Make every combination of the crossed axes, greedy and warm, once for each tree that results.

    Other settings are taken in turn from the cells that cover their pairs.
    """
    crossed = {}
    for *values, sampling in product(*(AXES[name] for name in CROSSED), ("greedy", "warm")):
        setting = {**dict(zip(CROSSED, values, strict=True)), "sampling": sampling}
        tree = {**setting, "num_draft_tokens": width(setting)}
        crossed.setdefault(tuple(tree.values()), setting)
    return [{**covering[index % len(covering)], **setting} for index, setting in enumerate(crossed.values())]
