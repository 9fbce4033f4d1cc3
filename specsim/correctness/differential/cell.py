"""One setting in which the implementations are compared."""

from dataclasses import dataclass, field, replace
from typing import Literal

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions, check_graph
from specsim.core.errors import InputError
from specsim.core.grammar import Grammars
from specsim.core.kinds import TESTED, DrafterKind
from specsim.core.kv_buffer import KVFormat
from specsim.core.rule import AcceptanceRule

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
