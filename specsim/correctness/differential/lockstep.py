"""Three engines side by side: the reference drives, its float64 self says what was decidable, the fast one follows.

A step is one phase. Before it everybody has the same state and the same KV; after it the reference and its float64 self
say how large rounding errors are here, and everything that the fast column left is held against that: what it chose,
what it wrote, and what it should not have touched. Then the reference's results are handed on, right or wrong: the
oracle (specsim.correctness.differential.oracle) is who checks those.
"""

import traceback
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from specsim.core.errors import InputError
from specsim.core.pair import Pair
from specsim.core.phases import Batch, PrefillInput, PrefillOutput, State
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.comparison import Tally, Trio
from specsim.correctness.differential.divergence import Divergence, Mismatch
from specsim.correctness.differential.phase import compare_step
from specsim.correctness.differential.scene import Column, Scene
from specsim.correctness.differential.slots import compare_books
from specsim.serving.requests import Request, make_requests

PHASES = ("draft", "verify", "draft_extend")


class Diverged(Exception):
    """The fast column was wrong: what follows would say little."""


@dataclass(slots=True)
class Lockstep:
    """A cell on its way.

    draft_ids: see Scene. left_out: places in the batch that rounding has parted from the reference. shown: what the
    fast column left last, and a copy of it.
    """

    cell: Cell
    columns: Trio[Column]
    draft_ids: torch.Tensor
    tally: Tally = field(default_factory=Tally)
    divergences: list[Divergence] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    round: int = 0
    shown: tuple[Any, Any] = (None, None)

    def run(self, pair: Pair) -> None:
        """Prefill, then rounds until every request has finished or the cell ends; the first divergence ends it too."""
        config = self.columns.reference.engine.config
        cell = self.cell
        limit = config.max_len
        running = make_requests(pair, cell.prompts, list(cell.sampling), cell.request_ids, limit)
        try:
            batch = self._prefill(running)
            while self.round < self.cell.rounds:
                running, batch = self._drop_finished(running, batch)
                if not running:
                    break
                self.round += 1
                batch = self._round(running, batch)
            self._close(running)
            if self.cell.is_idle_too:
                self._run_idle(batch)
        except Diverged:
            pass

    def _round(self, running: list[Request], batch: Batch) -> Batch:
        """The three phases, each one step; in graph mode `round` they are one step, compared after it.

        `lockstep` hands the reference's state and pools over before every step; `free` only to bring columns together
        again that rounding has parted.
        """
        outputs = {}
        for step in self._steps():
            if self.cell.mode == "lockstep":
                self._hand_over()
            outputs |= self._step(step, batch)
        if self.left_out:
            self._hand_over()
        self.tally.exercised["padded rows"] += self._num_padded(batch)
        verdict = outputs["verify"].reference.verdict
        counts = verdict.num_accepted_tokens.tolist()
        for request, tokens, logprobs, count in zip(
            running, verdict.accepted_tokens(), verdict.logprobs.tolist(), counts, strict=True
        ):
            request.take(tokens, logprobs[:count])
        return batch.after(verdict.num_accepted_tokens)

    def _step(self, phases: tuple[str, ...], batch: Batch) -> dict[str, Trio[Any]]:
        """Advance every column, then compare what they left: outputs by phase."""
        reference, _, fast = self.columns
        scene = Scene(
            config=reference.engine.config,
            batch=batch,
            columns=self.columns,
            before=deepcopy(fast.pools),
            owned=deepcopy(reference.pools),
            draft_ids=self.draft_ids,
            eps=torch.finfo(reference.dtype).eps,
            tally=self.tally,
        )
        entered = self.columns.map(lambda column: column.state)
        call = phases[0] if len(phases) == 1 else "round"
        own_entered = deepcopy(entered.fast)
        left = [self._advance(name, call, batch) for name in Trio._fields]
        self._unchanged(call, "the state that it read", entered.fast, own_entered)
        self._unchanged(call, "a state that it had left before", *self.shown)
        self.shown = left[2], deepcopy(left[2])
        by_phase = zip(*left, strict=True) if call == "round" else [left]
        outputs = {phase: Trio(*states) for phase, states in zip(phases, by_phase, strict=True)}
        outputs = {phase: states._replace(fast=states.fast.to("cpu")) for phase, states in outputs.items()}
        self._note(compare_step(scene, entered, outputs, self.left_out))
        return outputs

    def _advance(self, name: str, call: str, batch: Batch) -> Any:
        """One column's step; an error in it is a divergence like any other, also where a reference raises it."""
        try:
            return getattr(self.columns, name).advance(call, deepcopy(batch))
        except InputError:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{name}: {type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
            self._note([(call, None, Mismatch("error", None, message))])
            raise Diverged from error

    def _unchanged(self, call: str, what: str, state: Any, copy: Any) -> None:
        if not _same_bits(state, copy):
            self._note([(call, None, Mismatch(what, "unchanged", "written to"))])

    def _note(self, found: Any) -> None:
        self.divergences += [
            Divergence(self.cell.id, self.round, phase, request, each.node, each.field, each.reference, each.fast)
            for phase, request, each in found
        ]
        if self.divergences and not self.tally.is_rehearsal:
            raise Diverged

    def _hand_over(self) -> None:
        for column in self.columns[1:]:
            column.take_over(self.columns.reference)
        self.left_out.clear()

    def _prefill(self, requests: list[Request]) -> Batch:
        """Every prompt in as many parts as the cell says, over pools that hold no numbers yet."""
        lengths = [len(request.prompt_ids) for request in requests]
        rows: list[int] = []
        for column in self.columns:
            _fill_with_nan(column)
            rows = [column.pools.open() for _ in requests]
            for row, length in zip(rows, lengths, strict=True):
                column.pools.reserve(row, length)
        for request, row in zip(requests, rows, strict=True):
            request.row = row
        ids = [request.request_id for request in requests]
        params = [request.params for request in requests]
        vocab_size = self.columns.reference.engine.target.config.vocab_size
        batch = Batch.of(ids, rows, lengths, params, vocab_size)
        prompts = [request.prompt_ids for request in requests]
        for part in range(self.cell.chunks - 1):
            self._prefill_part(prompts, part, batch)
            if self.cell.mode == "lockstep":
                self._hand_over()
        output = self._prefill_part(prompts, self.cell.chunks - 1, batch)
        for request, token, logprob in zip(
            requests, output.next_tokens.tolist(), output.logprobs.tolist(), strict=True
        ):
            request.take([token], [logprob])
        if self.left_out:
            self._hand_over()
        return batch

    def _prefill_part(self, prompts: list[list[int]], part: int, batch: Batch) -> PrefillOutput:
        prefill = _part(prompts, part, self.cell.chunks)
        for column in self.columns:
            column.state = prefill.to(column.device)
        ends = prefill.start_lens + prefill.row_starts.diff()
        return self._step(("prefill",), replace(batch, seq_lens=ends))["prefill"].reference

    def _drop_finished(self, running: list[Request], batch: Batch) -> tuple[list[Request], Batch]:
        """As in generation; every column closes the same rows."""
        kept = [place for place, request in enumerate(running) if not request.finish_reason]
        for column in self.columns:
            for request in running:
                if request.finish_reason:
                    column.pools.close(request.row)
            column.keep(kept)
        return [running[place] for place in kept], batch.filter(torch.tensor(kept, dtype=torch.int64))

    def _close(self, running: list[Request]) -> None:
        """After the last round every page is free again."""
        for column in self.columns:
            for request in running:
                column.pools.close(request.row)
        balanced, expected, found = compare_books(self.columns.reference.pools, self.columns.fast.pools)
        if not balanced or expected["free"] != expected["slots"]:
            self._note([("close", None, Mismatch("page books", expected, found))])

    def _run_idle(self, batch: Batch) -> None:
        """A round of no request: states of no row and of the right types, and nothing written."""
        for column in self.columns:
            column.state = column.engine.drafter.idle()
        for step in self._steps():
            self._step(step, batch.filter(torch.empty(0, dtype=torch.int64)))

    def _steps(self) -> list[tuple[str, ...]]:
        """The phases of a round by what is one call of an engine."""
        return [PHASES] if self.cell.graph == "round" else [(phase,) for phase in PHASES]

    def _num_padded(self, batch: Batch) -> int:
        """Rows that a column which pads its batches added to this one."""
        bucket = self.cell.bucket or 1 << (batch.size - 1).bit_length()
        return bucket - batch.size if self.columns.fast.pads else 0


def _fill_with_nan(column: Column) -> None:
    for kv in (column.pools.target, column.pools.draft):
        if kv is not None:
            kv.keys.fill_(torch.nan)
            kv.values.fill_(torch.nan)


def _part(prompts: list[list[int]], part: int, chunks: int) -> PrefillInput:
    """Part `part` of every prompt; the token after it is known unless it is the last."""
    bounds = [(len(p) * part // chunks, len(p) * (part + 1) // chunks) for p in prompts]
    whole = PrefillInput.whole([p[low:high] for p, (low, high) in zip(prompts, bounds, strict=True)])
    known = [p[high] if high < len(p) else -1 for p, (_, high) in zip(prompts, bounds, strict=True)]
    return replace(whole, start_lens=torch.tensor([low for low, _ in bounds]), next_tokens=torch.tensor(known))


def _same_bits(first: Any, second: Any) -> bool:
    """Whether two states hold the same, not-a-numbers included."""
    if isinstance(first, State):
        return all(_same_bits(getattr(first, each.name), getattr(second, each.name)) for each in fields(first))  # pyright: ignore[reportArgumentType]  # every State is a dataclass
    if isinstance(first, tuple):
        return all(map(_same_bits, first, second))
    return first is second if first is None else torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
