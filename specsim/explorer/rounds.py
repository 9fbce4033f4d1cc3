"""specsim.trace(...): a generation whose rounds can be looked at one by one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, overload

from specsim.core.arguments import check_arguments
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.display import LEGEND, coloured, figure
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError, require_int
from specsim.core.grammar import Grammar
from specsim.core.metrics import Acceptance
from specsim.core.pair import AnyDrafter, Pair
from specsim.core.rule import AcceptanceRule
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.explorer.recorder import Recorder
from specsim.explorer.round import Round, node_table
from specsim.models.load import load
from specsim.serving.generation import generate
from specsim.serving.outputs import Generation

if TYPE_CHECKING:
    import pandas

    from specsim.plots.sheet import Decode, Picture


@dataclass(frozen=True, slots=True)
class RoundsSource:
    """Names of what made recorded rounds."""

    pair: str  # name of the pair
    drafter: str  # its kind
    impl: str  # implementation that ran: reference or fast
    num_rounds: int  # of the run, with those that were not kept


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rounds(Sequence[Round]):
    """The recorded rounds of a generation, in order."""

    generation: Generation
    request_ids: tuple[int, ...]  # of generation.outputs
    decode: "Decode"
    rounds: tuple[Round, ...]
    source: RoundsSource

    @overload
    def __getitem__(self, index: int) -> Round: ...
    @overload
    def __getitem__(self, index: slice) -> "Rounds": ...
    def __getitem__(self, index: int | slice) -> "Round | Rounds":
        if isinstance(index, slice):
            return Rounds(self.generation, self.request_ids, self.decode, self.rounds[index], self.source)
        return self.rounds[index]

    def __len__(self) -> int:
        return len(self.rounds)

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance over all rounds of the generation."""
        return self.generation.acceptance

    def of(self, request: int) -> list[Round]:
        """List the rounds that a request took part in."""
        if request not in self.request_ids:
            raise InputError("request", request, f"one of {', '.join(map(str, self.request_ids))}")
        return [recorded_round for recorded_round in self.rounds if request in recorded_round.request_ids]

    def tree(self, round: int = 0, request: int | None = None) -> "Picture":
        """Draw the token tree of a round; request: an id, needed where the round has several."""
        return self[round].tree(request)

    def to_pandas(self) -> "pandas.DataFrame":
        """Make one table of all nodes: Round.verify, with the round and the request before its columns."""
        columns: dict[str, list[Any]] = {}
        for recorded_round in self.rounds:
            for request in recorded_round.request_ids:
                table = recorded_round.verify(request)
                named = {"round": [recorded_round.index] * len(table), "request": [request] * len(table)}
                for name, values in (named | {name: list(table[name]) for name in table}).items():
                    columns.setdefault(name, []).extend(values)
        return node_table(columns)

    def __repr__(self) -> str:
        size = f"{len(self.rounds)} rounds of {len(self.request_ids)} requests"
        return f"Rounds({size}, accept length {figure(self.acceptance.accept_length)}; rounds[0].tree() draws a round)"

    def _repr_html_(self) -> str:
        style = "text-align:left;white-space:pre-wrap;font-family:monospace"
        texts = [coloured(output, self.decode) for output in self.generation.outputs]
        parts = "".join(
            f"<tr><th style='text-align:left;vertical-align:top'>{request}</th><td style='{style}'>{text}</td></tr>"
            for request, text in zip(self.request_ids, texts, strict=True)
        )
        return f"<table><caption>{escape(repr(self))}<br>{LEGEND}</caption>{parts}</table>"


@check_arguments
def trace(
    pair: Pair | str,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    config: SpecConfig | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    grammars: Grammar | Sequence[Grammar | None] | None = None,
    request_ids: Sequence[int] | None = None,
    engine: EngineOptions | None = None,
    acceptance: SyntheticAcceptance | None = None,
    drafter: AnyDrafter | None = None,
    verifier: AcceptanceRule | None = None,
    most_rounds: int | None = None,
    progress: bool = False,
) -> Rounds:
    """Generate as specsim.generate does, with the same arguments and tokens, and keep every round.

    most_rounds: rounds to keep, the first ones; None: all. The states of a round are copied to the CPU: some megabytes
    for a small vocabulary, N · V logits for each request and round. Rounds run phase by phase, so that no graph holds a
    whole round.
    """
    pair = load(pair) if isinstance(pair, str) else pair
    if most_rounds is not None:
        require_int("most_rounds", most_rounds)
    recorders: list[Recorder] = []

    def watch(engine: Engine) -> Any:
        recorders.append(Recorder(engine, most_rounds))
        return recorders[-1]

    generation = generate(
        pair,
        prompts,
        config,
        sampling,
        grammars=grammars,
        request_ids=request_ids,
        engine=engine,
        acceptance=acceptance,
        drafter=drafter,
        verifier=verifier,
        progress=progress,
        watch=watch,
    )
    (recorder,) = recorders
    ids = range(len(generation.outputs)) if request_ids is None else request_ids
    return recorded_rounds(pair if drafter is None else pair.with_drafter(drafter), generation, ids, recorder)


def recorded_rounds(pair: Pair, generation: Generation, request_ids: Iterable[int], recorder: Recorder) -> Rounds:
    """Join a recorder's rounds with the generation that they made."""
    decode = decoder(pair)
    rounds = [
        Round(index, generation.config, pair.drafts, decode, states) for index, states in enumerate(recorder.rounds)
    ]
    source = RoundsSource(pair.name, pair.kind, recorder.options.impl, recorder.num_rounds)
    return Rounds(generation, tuple(request_ids), decode, tuple(rounds), source)


def decoder(pair: Pair) -> "Decode":
    """Give the function that makes text of the pair's tokens, or names them where there is no tokenizer."""
    return _ids if pair.tokenizer is None else pair.tokenizer.decode


def _ids(token_ids: Sequence[int]) -> str:
    """Text of tokens where there is no tokenizer."""
    return "".join(f"<{token}>" for token in token_ids)
