"""A mismatch of two implementations as a document: both sides of the round in which they first differ."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from specsim.core.errors import InputError
from specsim.core.grammar import allowed_trees, stacked
from specsim.core.pair import Pair
from specsim.core.phases import Batch
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.comparison import Tally, Trio
from specsim.correctness.differential.grid_run import perturbation_budgets
from specsim.correctness.differential.implementation import Implementation, load_implementations
from specsim.correctness.differential.lockstep import PHASES, Lockstep
from specsim.correctness.differential.pairs import make_pair, rounded
from specsim.correctness.differential.result import Divergence
from specsim.explorer.document import finished, head_of
from specsim.explorer.page_data import MismatchJson
from specsim.explorer.phases import request_round
from specsim.explorer.recorder import RecordedStates, tables
from specsim.explorer.round import Round
from specsim.explorer.rounds import RoundsSource, decoder

MOST_LETTERS = 300  # of a value
_OF_NODES = frozenset(
    "draft_tokens parents scores positions mask retrieve_index retrieve_next_token retrieve_next_sibling "
    "cache_locations predict".split()
)


# Fields of RecordedStates that a phase fills.
STATES = dict(zip(PHASES, ("verify_input", "verify_output", "next_draft_input"), strict=True))
POOLS = {"draft": "drafted_pools", "verify": "committed_pools"}


@dataclass(slots=True)
class Noted(Implementation):
    """An implementation that keeps the states of its latest round."""

    notes: dict[str, Any] = field(default_factory=dict)  # by field of RecordedStates, of the phases that have ended

    @classmethod
    def of(cls, side: Implementation) -> "Noted":
        """Make the same implementation with notes."""
        return cls(side.engine, side.pools, side.dtype, side.device, side.pads, side.state)

    def advance(self, phase: str, batch: Batch) -> Any:
        """Run a phase, or a whole round, and note its states."""
        if phase in ("draft", "round"):
            self.notes = {"batch": batch.to("cpu"), "draft_input": self.state.to("cpu")}
        output = Implementation.advance(self, phase, batch)
        outputs = dict(zip(PHASES, output, strict=True)) if phase == "round" else {phase: output}
        for name in STATES.keys() & outputs.keys() if self.notes else ():
            self.notes[STATES[name]] = outputs[name].to("cpu")
            if name in POOLS:
                self.notes[POOLS[name]] = tables(self.pools)
        return output

    def complete(self) -> RecordedStates:
        """Run the phases that are missing of the noted round; raises what the implementation raises."""
        if not self.notes:
            raise InputError("round", "none", "a round after the prefill")
        for phase in [name for name in PHASES if STATES[name] not in self.notes]:
            self.advance(phase, self.notes["batch"])
        batch = self.notes["batch"]
        drafts = self.notes["verify_input"], self.notes["drafted_pools"]
        allowed = stacked(allowed_trees(batch, *drafts, self.engine.grammars), batch.size)
        return RecordedStates(**self.notes, allowed=allowed, bonus_columns=self.engine.drafter.bonus_columns)


@torch.inference_mode()
def mismatch_document(
    cell: Cell,
    divergence: Divergence,
    impl: str = "fast",
    dtype: str = "float32",
    device: str | None = None,
    wrap: Callable[[Implementation], Implementation] = lambda implementation: implementation,
    pair: Pair | None = None,
) -> dict[str, Any]:
    """Run a cell again up to its divergence, and make the document of both sides of that round.

    divergence: as `check` found it. The other arguments are those of specsim.correctness.differential.check.
    """
    precision = getattr(torch, dtype)
    pair = make_pair(cell.pair, precision) if pair is None else rounded(pair, precision)
    loaded = load_implementations(cell, pair, impl, dtype, device)
    reference = Noted.of(loaded.reference)
    fast = Noted.of(wrap(loaded.fast))
    tally = Tally(budgets=perturbation_budgets(cell, pair, dtype))
    lockstep = Lockstep(cell, pair, Trio(reference, loaded.exact, fast), tally)
    lockstep.run()
    notes: list[str] = []
    name = impl if impl != "reference" else "reference under test"
    rounds = [_drawn(reference, "reference", lockstep, notes)]
    other = [_drawn(fast, name, lockstep, notes)]
    row = divergence.request
    if row is not None and reference.notes:  # of the batch, which finished requests have left
        row = _ids(cell).index(int(reference.notes["batch"].request_ids[row]))
    head = _head(cell, pair, reference, impl, lockstep) | {
        "mismatch": _mismatch(divergence, name, row, " ".join(notes)),
        "other": [recorded_round for recorded_round in other if recorded_round],
    }
    return finished(head, [recorded_round for recorded_round in rounds if recorded_round], decoder(pair))


def _ids(cell: Cell) -> tuple[int, ...]:
    return cell.request_ids or tuple(range(len(cell.prompts)))


def _drawn(side: Noted, name: str, lockstep: Lockstep, notes: list[str]) -> dict[str, Any] | None:
    """Make the value of a side's round; None with a note where its states cannot be drawn."""
    if not side.notes:
        notes.append(f"The difference is before the first round of {name}.")
        return None
    try:
        pair = lockstep.pair
        recorded_round = Round(lockstep.round, side.engine.config, pair.drafts, decoder(pair), side.complete())
        other = str(lockstep.cell.rule or "")
        row_of = {request: row for row, request in enumerate(_ids(lockstep.cell))}
        requests = [
            {"request": row_of[request]} | request_round(recorded_round, row, other)
            for row, request in enumerate(recorded_round.request_ids)
        ]
    except Exception as error:  # states of a wrong implementation may be of any kind
        notes.append(f"The round of {name} is not drawn ({type(error).__name__}: {error}).")
        return None
    return {"index": recorded_round.index - 1, "requests": requests}


def _head(cell: Cell, pair: Pair, reference: Noted, impl: str, lockstep: Lockstep) -> dict[str, Any]:
    decode = decoder(pair)
    rows: dict[int, list[int]] = {}  # by request id, the tokens before the round, and those of the round
    if "drafted_pools" in reference.notes:
        batch = reference.notes["batch"]
        token_ids = reference.notes["drafted_pools"].token_ids
        output = reference.notes.get("verify_output")
        accepted = [[]] * batch.size if output is None else output.verdict.accepted_tokens()
        for request, (row, length), accepted_tokens in zip(
            batch.request_ids.tolist(), batch.rows_and_lens, accepted, strict=True
        ):
            rows[request] = token_ids[row, : length + 1].tolist() + accepted_tokens
    requests = []
    for request, prompt, params in zip(_ids(cell), cell.prompts, cell.sampling, strict=True):
        requests.append((request, prompt, rows.get(request, [])[len(prompt) :], params.temperature, ""))
    source = RoundsSource(cell.pair, pair.kind, impl, lockstep.round)
    verifier = str(cell.rule or reference.engine.config.verifier)
    return head_of(source, reference.engine.config, verifier, requests, decode)


def _mismatch(divergence: Divergence, impl: str, request: int | None, note: str) -> MismatchJson:
    is_node = divergence.field in _OF_NODES
    return {
        "cell": divergence.cell,
        "round": divergence.round,
        "phase": divergence.phase,
        "step": _step(divergence),
        "request": request,
        "entry": divergence.node,
        "node": divergence.node if is_node else None,
        "field": divergence.field,
        "reference": str(divergence.reference)[:MOST_LETTERS],
        "other": str(divergence.fast)[:MOST_LETTERS],
        "impl": impl,
        "note": note,
    }


def _step(divergence: Divergence) -> str:
    """Choose the step of the page that shows a field."""
    name = divergence.field
    if name == "mask":
        return "mask"
    if any(
        part in name for part in ("keys", "values", "stray", "req_to_token", "token_ids", "page", "cache_locations")
    ):
        return "commit"
    return {"draft": "select", "verify": "verify", "draft_extend": "extend"}.get(divergence.phase, "verify")
