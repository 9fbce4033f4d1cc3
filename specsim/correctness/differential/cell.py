"""One setting under which the columns are compared."""

from dataclasses import dataclass, field

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError
from specsim.core.grammar import Grammars

MODES, GRAPHS = ("lockstep", "free"), ("eager", "step", "phase", "round")


@dataclass(frozen=True, slots=True)
class Cell:
    """What runs, and how it is compared.

    pair: a name of differential.pairs. sampling: one for each prompt, and so are request_ids, 0 and on unless
    given. mode `lockstep`: every phase starts from the reference's state and pools; `free`: the columns keep their own,
    until an undecidable choice parts them. graph, bucket: of the fast column. chunks: in how many parts prompts are
    prefilled. rounds: after so many the cell ends. is_idle_too: whether a round of no request follows. grammars: of
    requests, by their ids.
    """

    id: str
    pair: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]
    config: SpecConfig = field(default_factory=SpecConfig)
    mode: str = "lockstep"
    graph: str = "eager"
    bucket: int | None = None
    chunks: int = 1
    rounds: int = 4
    is_idle_too: bool = False
    request_ids: tuple[int, ...] | None = None
    grammars: Grammars = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self):
        for name, allowed in (("mode", MODES), ("graph", GRAPHS)):
            if getattr(self, name) not in allowed:
                raise InputError(name, getattr(self, name), " or ".join(allowed))
        shortest = min(map(len, self.prompts), default=1)
        if not 1 <= self.chunks <= shortest:
            raise InputError("chunks", self.chunks, f"1 to the tokens of the shortest prompt, {shortest}")
        if self.graph == "round" and self.config.release == "round":
            raise InputError(
                "graph", self.graph, "eager, step or phase with release 'round', which frees slots inside it"
            )
        if self.graph == "round" and self.grammars:
            raise InputError(
                "graph", self.graph, "eager, step or phase with a grammar, which the host asks inside a round"
            )
