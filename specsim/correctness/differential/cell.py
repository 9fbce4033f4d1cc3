"""Cells: one setting each in which the implementations are compared, made from values of the grids' axes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions, check_graph
from specsim.core.errors import InputError
from specsim.core.grammar import Grammars
from specsim.core.kinds import TESTED, DrafterKind
from specsim.core.kv_buffer import PLAIN, KVFormat
from specsim.core.rule import AcceptanceRule
from specsim.core.verifiers import DEFAULT_VERIFIER, KIND_OF

MODES = ("lockstep", "free")
GRAPHS = ("eager", "step", "phase", "round")


def storing(options: EngineOptions, kv: tuple[KVFormat, KVFormat]) -> EngineOptions:
    """Add number formats of the target's and the drafter's KV to an engine's options."""
    target, draft = kv
    return replace(
        options,
        kv_dtype=target.dtype,
        draft_kv_dtype=draft.dtype,
        kv_scales=(target.key_scale, target.value_scale),
        draft_kv_scales=(draft.key_scale, draft.value_scale),
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting, and the way the implementations are compared in it."""

    id: str
    pair: str  # a name of differential.pairs
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]  # one for each prompt
    config: SpecConfig = field(default_factory=SpecConfig)
    # `lockstep`: every phase starts from the reference's state and pools. `free`: each implementation keeps
    # its own until they diverge at a choice within rounding error.
    mode: Literal["lockstep", "free"] = "lockstep"
    graph: Literal["eager", "step", "phase", "round"] = "eager"  # of the fast implementation, as the bucket is
    bucket: int | None = None
    chunks: int = 1  # parts in which prompts are prefilled
    rounds: int = 4  # after these the cell ends
    is_idle_too: bool = False  # whether a round of no request follows
    request_ids: tuple[int, ...] | None = None  # one for each prompt; None: 0, 1, ...
    grammars: Grammars = field(default_factory=dict, repr=False, hash=False)  # of requests, by their ids
    rule: AcceptanceRule | None = None  # in place of the setting's verifier
    kv: tuple[KVFormat, KVFormat] = (KVFormat(), KVFormat())  # of the target's and the drafter's pool
    # Draft steps of a request's rounds, where the request of id i starts with entry i; (): those of the setting.
    draft_steps: tuple[int, ...] = ()

    @property
    def drafter(self) -> DrafterKind | None:
        """Record of the pair's drafter, None where no pair has that name."""
        return TESTED.get(self.pair.rpartition("-")[0])

    def options(self, options: EngineOptions) -> EngineOptions:
        """Add the cell's number formats of KV to an engine's options."""
        return storing(options, self.kv)

    def steps_from(self, first: int) -> tuple[int, ...]:
        """List the draft steps from an entry on, and then the others."""
        first %= max(len(self.draft_steps), 1)
        return self.draft_steps[first:] + self.draft_steps[:first]

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("graph", GRAPHS)):
            if getattr(self, name) not in allowed:
                raise InputError(name, getattr(self, name), " or ".join(allowed))
        shortest = min(map(len, self.prompts), default=1)
        if not 1 <= self.chunks <= shortest:
            raise InputError("chunks", self.chunks, f"1 to the tokens of the shortest prompt, {shortest}")
        if self.drafter and self.drafter.kv == "target" and self.kv[1] != KVFormat():
            allowed = f"model with {self.drafter.name}, which has no KV of its own"
            raise InputError("draft_kv_dtype", self.kv[1].dtype, allowed)
        check_graph(self.graph, self.config, bool(self.grammars), verifies_on_host=self.rule is not None)


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
# Number formats of the target's and the drafter's KV. No scale is 1 or a power of two, and no two are alike, so that a
# scale that is left out, used twice or taken from the other pool changes what is read.
KV_FORMATS = {
    "model": (PLAIN, PLAIN),
    "fp8": (KVFormat("fp8_e4m3", 0.3, 0.7), KVFormat("fp8_e4m3", 0.6, 0.2)),
    "fp8_target": (KVFormat("fp8_e4m3", 0.3, 0.7), PLAIN),
    "fp8_draft": (PLAIN, KVFormat("fp8_e4m3", 0.6, 0.2)),
}
LATER_FAMILIES = ("qwen2", "gpt_oss", "qwen3_moe", "deepseek_v3")
# A chain has width 1, a tree of one step at most topk + 1 nodes: such cells take what is possible.
AXES = {
    "topk": [1, 2, 4, 8, 16],
    "num_steps": [1, 2, 3, 5],
    "num_draft_tokens": [2, 8, 16, "most"],
    "page_size": [1, 2, 4, 16, 64],
    "batch": [1, 3],
    "sampling": list(SAMPLINGS),
    "kind": ["eagle", "eagle3"],
    "family": ["llama", "qwen3", "mistral", "noisy", *LATER_FAMILIES],
    "kv": list(KV_FORMATS),
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
# draft_steps `own`: every request has other steps in every round, 0 among them.
EXTRA = {"bucket": None, "idle": False, "verifier": DEFAULT_VERIFIER, "draft_steps": "all"}
# Left out in 16 bits, where rounding changes which experts a row has, and every tenth number of KV in fp8.
ROUTED = ("gpt_oss", "qwen3_moe", "deepseek_v3")
_ROUNDS = dict.fromkeys(("shipped", *LATER_FAMILIES), 2)  # of a cell, 4 of other families
NAMED = (*CROSSED, "sampling", "kind", "family")  # in every cell's id, default or not
DEFAULTS = {name: values[0] for name, values in AXES.items()}


def cell_of(setting: Mapping[str, Any]) -> Cell:
    """Make the cell of a setting; an axis that it does not name has its first value."""
    values = {**DEFAULTS, **EXTRA, **setting}
    kind = TESTED[values["kind"]]
    # It needs an output long enough to repeat itself.
    looked_up = not kind.has_weights or kind.variant(values["kind"]).differs_in == "lookup"
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
        rounds=12 if looked_up else _ROUNDS.get(values["family"], 4),
        is_idle_too=values["idle"],
        kv=KV_FORMATS[values["kv"]],
        draft_steps=tuple(range(config.num_steps, -1, -1)) if values["draft_steps"] == "own" else (),
    )


def one_cell(config: SpecConfig, temperature: float, pair: str, batch: int, mode: str, graph: str) -> Cell:
    """Make a cell of any setting."""
    sampling = SamplingParams(temperature=temperature)
    if batch < 1:
        raise InputError("batch", batch, "at least 1")
    limited = tuple(replace(sampling, max_new_tokens=(12, 4, 9)[index % 3], seed=index) for index in range(batch))
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
    nodes = 1 + topk * steps if KIND_OF[verifier].has_lanes else width(values)
    return SpecConfig(topk, steps, nodes, verifier=verifier, **{name: values[name] for name in names}, max_len=max_len)


def width(values: Mapping[str, Any]) -> int:
    """Count the nodes of a setting's tree."""
    topk = values["topk"]
    steps = values["num_steps"]
    most = min(MOST_NODES, 1 + topk + (steps - 1) * topk**2)
    nodes = most if values["num_draft_tokens"] == "most" else min(values["num_draft_tokens"], most)
    return steps + 1 if topk == 1 else nodes


def _prompts(page_size: int, batch: int) -> tuple[tuple[int, ...], ...]:
    """Make prompts: the first ends just before a page does, the next at its end."""
    page = page_size if page_size >= 16 else 8
    lengths = [(page - 1, page, 5)[index % 3] for index in range(batch)]
    return tuple(tuple((7 * i + 3 * i * i + 11 * b) % VOCAB_SIZE for i in range(n)) for b, n in enumerate(lengths))


def _sampling(name: str, batch: int, limits: tuple[int, ...]) -> tuple[SamplingParams, ...]:
    """Make sampling parameters with these limits: the second request ends early, so that a batch shrinks.

    `mixed` gives every request its own parameters.
    """
    names = list(SAMPLINGS) if name == "mixed" else [name]
    return tuple(replace(SAMPLINGS[names[b % len(names)]], max_new_tokens=limits[b]) for b in range(batch))
