"""Grids of cells: from a few that take seconds to every combination."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.drafter_grid import LOOKED_UP, LOOKED_UP_CELLS, drafter_settings
from specsim.correctness.pairwise import pairwise

GRIDS = ("quick", "pairwise", "drafters", "full")
MOST_NODES = 32
VOCAB_SIZE = 48
ROOM = 6
LIMITS = (12, 4, 9)  # new tokens of a cell's requests
SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=1.0, seed=2**63 + 9),
    "filtered": SamplingParams(temperature=0.7, top_k=12, top_p=0.9, min_p=0.02, seed=3),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.4),
    "biased": SamplingParams(
        temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.2, logit_bias={3: 1.5, 7: -2.0}, seed=4
    ),
}
# A chain has width 1, a tree of one step at most topk + 1 nodes: such cells take what is possible.
AXES = {
    "topk": [1, 2, 4, 8, 16],
    "num_steps": [1, 2, 3, 5],
    "num_draft_tokens": [2, 8, 16, "most"],
    "page_size": [1, 2, 4, 16, 64],
    "batch": [1, 3],
    "sampling": list(SAMPLINGS),
    "kind": ["eagle", "eagle3"],
    "family": ["llama", "qwen3", "mistral", "noisy"],
    "draft_kv": ["lane", "ancestor"],
    "extend": ["fixed", "ragged"],
    "release": ["finish", "round"],
    "score": ["prob", "logprob"],
    "penalties": ["exact", "relaxed"],
    "threshold_single": [1.0, 0.3],
    "threshold_acc": [1.0, 0.6],
    "max_len": [None, "near"],
    "graph": ["eager", "step", "phase", "round"],
    "mode": ["lockstep", "free"],
    "chunks": [1, 2],
}
CROSSED = ("topk", "num_steps", "num_draft_tokens", "page_size", "batch")
EXTRA = {"bucket": None, "idle": False, "verifier": "target_only"}
NAMED = (*CROSSED, "sampling", "kind", "family")  # in every cell's id, default or not
DEFAULTS = {name: values[0] for name, values in AXES.items()}
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
VERIFIERS = (
    dict(topk=1, num_steps=2, page_size=4, sampling="warm", verifier="rejection", max_len="near", mode="free"),
    dict(topk=1, num_steps=2, page_size=4, batch=3, sampling="mixed", verifier="block", graph="round", idle=True),
    dict(topk=1, num_steps=2, page_size=4, sampling="filtered", verifier="gumbel", graph="phase", kind="eagle3"),
    dict(topk=2, num_steps=2, page_size=4, sampling="warm", verifier="multi_round", graph="step", kind="eagle3"),
    dict(topk=2, num_steps=2, num_draft_tokens=5, page_size=4, sampling="warm", verifier="typical"),
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
    *VERIFIERS,
)
# Drafters that keep other KV than EAGLE heads: a language model of its own, and one on the target's KV.
OWN_KV = (
    dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3),
    dict(topk=1, num_steps=3, batch=3, sampling="warm", verifier="rejection", family="mistral")
    | dict(graph="round", idle=True),
    dict(QUICK[0], page_size=16, family="qwen3", extend="ragged", release="round", graph="phase", chunks=2),
    dict(topk=4, num_steps=5, num_draft_tokens="most", page_size=4, batch=3, family="mistral", draft_kv="ancestor")
    | dict(score="logprob", max_len="near", mode="free"),
    dict(topk=2, num_steps=3, page_size=4, batch=3, sampling="mixed", verifier="multi_round", family="noisy")
    | dict(graph="step", max_len="near"),
    dict(topk=1, num_steps=5, page_size=4, sampling="warm", verifier="block", release="round")
    | dict(graph="step", mode="free"),
    dict(topk=1, num_steps=2, page_size=16, sampling="filtered", verifier="gumbel", family="qwen3", graph="round"),
    dict(topk=4, num_steps=3, num_draft_tokens=16, page_size=16, batch=3, sampling="warm", threshold_acc=0.1)
    | dict(family="noisy", graph="round", bucket=4, max_len="near"),
)
# Modules of MTP, three in every pair: chains and products, all verifiers, windows, chunks, rows written again.
MTP = (
    *(
        dict(topk=1, num_steps=3, page_size=4, batch=3, kind="mtp", family=family, graph=graph, sampling=sampling)
        for family, graph, sampling in (
            ("llama", "eager", "warm"),
            ("qwen3", "phase", "greedy"),
            ("mistral", "step", "greedy"),  # vllm#41162: a sliding window, and more than two drafts
            ("mistral", "round", "warm"),
            ("noisy", "round", "penalties"),
        )
    ),
    dict(QUICK[0], kind="mtp", graph="phase", sampling="filtered", release="round", extend="ragged", chunks=2),
    dict(QUICK[0], kind="mtp", family="twins", graph="round", score="logprob", mode="free", page_size=1),
    dict(QUICK[0], kind="mtp", family="noisy", num_steps=2, graph="step", max_len="near", chunks=2, idle=True),
    *(dict(each, kind="mtp", num_steps=3) for each in VERIFIERS[:4]),
    dict(QUICK[0], kind="mtp.one", graph="step"),
    dict(QUICK[0], kind="mtp.parallel", graph="round", topk=1),
)
# Cells of drafters beyond their pairs.
DRAFTERS = (
    QUICK[0] | DEEP | {"kind": "eagle3.1", "graph": "round"},
    QUICK[1] | {"kind": "eagle3.1", "family": "noisy", "extend": "ragged"},
    dict(QUICK[0], kind="eagle3.1", family="qwen3", topk=1, num_steps=3, graph="step"),
    *(each | {"kind": kind} for kind in ("standalone", "standalone.tli", "frozen-kv") for each in OWN_KV),
    *(each | {"kind": kind} for kind in ("standalone.shifted", "frozen-kv.next") for each in OWN_KV[1:4]),
    *MTP,
    *LOOKED_UP_CELLS,
)
SHIPPED = (
    dict(QUICK[0], family="shipped", kind="eagle3", graph="round", mode="free", batch=1),
    dict(QUICK[0], family="shipped", kind="eagle", graph="phase", topk=1, num_steps=5, batch=1, sampling="warm"),
    *(
        dict(QUICK[0], family="shipped", kind=kind, graph="phase", mode="free", batch=1)
        for kind in ("mtp", "standalone", "frozen-kv", "ngram", "suffix")
    ),
)


def grid(name: str, dtype: str = "float32") -> tuple[Cell, ...]:
    """Make the cells of a grid by its name; in bfloat16 with EAGLE pairs whose margins its arithmetic keeps."""
    if name not in GRIDS:
        raise InputError("grid", name, " or ".join(GRIDS))
    if name == "quick":
        settings: list[dict] = [*QUICK]
    elif name == "drafters":
        settings = [*drafter_settings(), *DRAFTERS]
    else:
        backwards = {axis: values[::-1] for axis, values in AXES.items()}
        settings = [*pairwise(AXES, is_valid), *pairwise(backwards, is_valid)]
        crossed = _crossed(settings) if name == "full" else []
        drafters = [*drafter_settings(), *DRAFTERS] if name == "full" else []
        settings = [*crossed, *settings, *SPECIAL, *SHIPPED, *drafters]
    if dtype == "bfloat16":
        settings = [each for each in settings if each.get("kind", "eagle").startswith("eagle")]
        settings = [each | {"family": _wide(each.get("family", DEFAULTS["family"]))} for each in settings]
    return tuple({cell.id: cell for cell in map(cell_of, settings)}.values())


def _wide(family: str) -> str:
    return {"llama": "wide", "noisy": "wide", "qwen3": "wide_qwen3", "mistral": "wide_mistral"}.get(family, family)


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
        width = _width(setting)
        crossed.setdefault(tuple({**setting, "num_draft_tokens": width}.values()), setting)
    return [{**covering[place % len(covering)], **setting} for place, setting in enumerate(crossed.values())]


def cell_of(setting: Mapping[str, Any]) -> Cell:
    """Make the cell of a setting; an axis that it does not name has its first value."""
    values = {**DEFAULTS, **EXTRA, **setting}
    looked_up = values["kind"] in LOOKED_UP  # needs an output long enough to repeat itself
    prompts = _prompts(values["page_size"], values["batch"])
    config = _config(values, max(map(len, prompts)))
    values["num_draft_tokens"] = config.num_draft_tokens
    return Cell(
        id="-".join(
            _label(name, value)
            for name, value in values.items()
            if name in NAMED or value != {**DEFAULTS, **EXTRA}[name]
        ),
        pair=f"{values['kind']}-{values['family']}",
        prompts=prompts,
        sampling=_sampling(values["sampling"], values["batch"], (36, 6, 24) if looked_up else LIMITS),
        config=config,
        mode=values["mode"],
        graph=values["graph"],
        bucket=values["bucket"],
        chunks=values["chunks"],
        rounds=12 if looked_up else 2 if values["family"] == "shipped" else 4,
        is_idle_too=values["idle"],
    )


def one_cell(config: SpecConfig, temperature: float, pair: str, batch: int, mode: str, graph: str) -> Cell:
    """Make a cell of any setting."""
    sampling = SamplingParams(temperature=temperature)
    if batch < 1:
        raise InputError("batch", batch, "at least 1")
    limited = tuple(replace(sampling, max_new_tokens=(12, 4, 9)[place % 3], seed=place) for place in range(batch))
    return replace(Cell("one cell", pair, _prompts(config.page_size, batch), limited, config), mode=mode, graph=graph)


def _label(name: str, value: Any) -> str:
    short = {"topk": "k", "num_steps": "s", "num_draft_tokens": "n", "page_size": "p", "batch": "b"}
    words = ("sampling", "kind", "family", "draft_kv", "extend", "penalties", "score", "mode")
    return f"{short[name]}{value}" if name in short else value if name in words else f"{name}={value}"


def _config(values: Mapping[str, Any], longest: int) -> SpecConfig:
    topk = values["topk"]
    steps = values["num_steps"]
    verifier = values["verifier"]
    names = ("page_size", "draft_kv", "extend", "release", "score", "penalties", "threshold_single", "threshold_acc")
    max_len = longest + ROOM if values["max_len"] == "near" else None
    width = 1 + topk * steps if verifier == "multi_round" else _width(values)
    return SpecConfig(topk, steps, width, verifier=verifier, **{name: values[name] for name in names}, max_len=max_len)


def _width(values: Mapping[str, Any]) -> int:
    topk = values["topk"]
    steps = values["num_steps"]
    most = min(MOST_NODES, 1 + topk + (steps - 1) * topk**2)
    width = most if values["num_draft_tokens"] == "most" else min(values["num_draft_tokens"], most)
    return steps + 1 if topk == 1 else width


def _prompts(page_size: int, batch: int) -> tuple[tuple[int, ...], ...]:
    """Make prompts: the first ends just before a page does, the next at its end."""
    page = page_size if page_size >= 16 else 8
    lengths = [(page - 1, page, 5)[place % 3] for place in range(batch)]
    return tuple(tuple((7 * i + 3 * i * i + 11 * b) % VOCAB_SIZE for i in range(n)) for b, n in enumerate(lengths))


def _sampling(name: str, batch: int, limits: tuple[int, ...]) -> tuple[SamplingParams, ...]:
    """Make sampling parameters with these limits: the second request ends early, so that a batch shrinks.

    `mixed` gives every request its own parameters.
    """
    names = list(SAMPLINGS) if name == "mixed" else [name]
    return tuple(replace(SAMPLINGS[names[b % len(names)]], max_new_tokens=limits[b]) for b in range(batch))
