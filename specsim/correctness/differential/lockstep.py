"""Engines side by side: the reference drives, its float64 run bounds rounding, those under test follow.

A step is one phase, or a round in one graph. Before it all engines have the same state and KV. After it the reference
and its float64 run bound the rounding errors. Everything that the implementation under test produced is compared with
them: what it chose, what it wrote, and what it should not have touched. Then the reference's results are handed on,
right or wrong: the oracle (specsim.correctness.differential.oracle) checks those.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from specsim.core.drafter import columns_ahead
from specsim.core.errors import InputError, with_location
from specsim.core.pair import Pair
from specsim.core.phases import Batch, PrefillInput, PrefillOutput, State
from specsim.core.rank_group import RankLost, RanksDiffer
from specsim.core.text_forward import target_error
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.comparison import FieldChecks, Mismatch, Tally, Trio
from specsim.correctness.differential.implementation import Implementation, empty
from specsim.correctness.differential.kv import compare_books
from specsim.correctness.differential.pairs import draft_ids
from specsim.correctness.differential.phase import StepDifference, compare_step
from specsim.correctness.differential.result import Divergence
from specsim.correctness.differential.step import ComparedStep
from specsim.serving.requests import Request, make_requests

PHASES = ("draft", "verify", "draft_extend")


class Diverged(Exception):
    """A wrong implementation under test, after which no comparison is meaningful."""


@dataclass(slots=True)
class TestedImplementation:
    """An implementation under test."""

    implementation: Implementation
    not_compared: set[int] = field(default_factory=set)  # places in the batch of requests that diverged by rounding
    output: Any = None  # state that it returned last
    output_copy: Any = None

    def note_writes(self, call: str, states: tuple[Any, Any], output: Any) -> list[StepDifference]:
        """Compare its input state and its last output with their copies; states: the input and its copy."""
        kinds = {"its input state": states, "an earlier output state": (self.output, self.output_copy)}
        self.output = output
        self.output_copy = deepcopy(output)
        return [
            StepDifference(call, None, Mismatch(kind, "unchanged", "written to"))
            for kind, pair in kinds.items()
            if not _same_bits(*pair)
        ]


@dataclass(slots=True)
class Lockstep:
    """A running comparison of one cell."""

    cell: Cell
    pair: Pair
    implementations: Trio[Implementation]
    tally: Tally = field(default_factory=Tally)
    others: tuple[Implementation, ...] = ()  # more implementations under test
    divergences: list[Divergence] = field(default_factory=list)
    round: int = 0
    tested: list[TestedImplementation] = field(init=False)

    def __post_init__(self) -> None:
        self.tested = [
            TestedImplementation(implementation) for implementation in (self.implementations.fast, *self.others)
        ]

    @property
    def engines(self) -> tuple[Implementation, ...]:
        """All implementations, the reference first."""
        return (*self.implementations, *self.others)

    def run(self) -> None:
        """Run prefill, then rounds until every request has finished or the cell ends, or up to the first divergence."""
        cell = self.cell
        limit = self.implementations.reference.engine.config.max_len
        running = make_requests(self.pair, cell.prompts, list(cell.sampling), cell.request_ids, limit)
        try:
            batch = self._prefill(running)
            while self.round < cell.rounds:
                running, batch = self._drop_finished(running, batch)
                if not running:
                    break
                self.round += 1
                batch = self._round(running, self._with_steps(batch))
            self._close(running)
            if cell.is_idle_too:
                self._run_idle(batch)
        except Diverged:
            pass

    def _round(self, running: list[Request], batch: Batch) -> Batch:
        """Run the three phases, each as one step; in graph mode `round` they are one step.

        `lockstep` hands the reference's state and pools over before every step. `free` does so only to realign
        implementations that diverged by rounding.
        """
        outputs = {}
        for step in self._steps():
            if self.cell.mode == "lockstep":
                self._hand_over()
            outputs |= self._step(step, batch)
        self._realign()
        bucket = self.cell.bucket or 1 << (batch.size - 1).bit_length()
        self.tally.coverage["padded rows"] += (bucket - batch.size) * self.implementations.fast.pads
        verdict = outputs["verify"].reference.verdict
        rows = zip(running, verdict.accepted_tokens(), verdict.logprobs.tolist(), strict=True)
        for request, tokens, logprobs in rows:
            request.take(tokens, logprobs[: len(tokens)])
        return batch.after(verdict.num_accepted_tokens)

    def _with_steps(self, batch: Batch) -> Batch:
        """Give every request its own draft steps, where the cell has them."""
        if not self.cell.draft_steps:
            return batch
        steps = [self.cell.steps_from(request_id + self.round - 1)[0] for request_id in batch.request_ids.tolist()]
        return replace(batch, draft_steps=torch.tensor(steps, dtype=torch.int32))

    def _step(self, phases: tuple[str, ...], batch: Batch) -> dict[str, Trio[Any]]:
        """Advance every implementation, then compare the outputs of those under test by phase."""
        reference, exact, _ = self.implementations
        call = phases[0] if len(phases) == 1 else "round"
        entered = (reference.state, exact.state)
        tables_before = deepcopy(reference.pools)
        results = (self._advance("reference", reference, call, batch), self._advance("exact", exact, call, batch))
        outputs: dict[str, Trio[Any]] = {}
        for tested in self.tested:
            fast = tested.implementation
            state = fast.state
            # A perturbation run only measures budgets: what it writes is not compared.
            state_copy, pools_before = (None, None) if self.tally.is_perturbation else deepcopy((state, fast.pools))
            trio: Any = Trio(*results, self._advance("fast", fast, call, batch))
            differences = [] if pools_before is None else tested.note_writes(call, (state, state_copy), trio.fast)
            by_phase = [Trio(*states) for states in zip(*trio, strict=True)] if call == "round" else [trio]
            on_host = [states._replace(fast=states.fast.to("cpu")) for states in by_phase]
            outputs = dict(zip(phases, on_host, strict=True))
            self._check_finite(outputs, batch)
            step = ComparedStep(
                batch=batch,
                implementations=Trio(reference, exact, fast),
                entered=Trio(*entered, state),
                outputs=outputs,
                pools_before=pools_before,
                tables_before=tables_before,
                draft_ids=draft_ids(self.pair),
                check=FieldChecks(self.tally, torch.finfo(reference.dtype).eps),
            )
            differences += [] if differences else compare_step(step, tested.not_compared)
            if self.tally.is_perturbation:  # broken ties too part a run from the exact one
                tested.not_compared.update(wrong.request for wrong in differences if wrong.request is not None)
            self._note(_of_ranks(tested, differences))
        return outputs

    def _check_finite(self, outputs: dict[str, Trio[Any]], batch: Batch) -> None:
        """Raise NotFinite where the target itself gives NaN to the reference.

        NaN from slots that nothing should read is a difference, which the comparison finds.
        """
        states = [outputs[phase].reference for phase in ("prefill", "verify") if phase in outputs]
        for state in states:
            is_prefill = isinstance(state, PrefillOutput)
            logprobs = state.logprobs[:, None] if is_prefill else state.verdict.logprobs
            for index, column in logprobs.isnan().nonzero().tolist()[:1]:
                reference = self.implementations.reference
                length = int(batch.seq_lens[index]) + column + (not is_prefill)
                tokens = reference.pools.token_ids[batch.req_pool_indices[index], :length].tolist()
                error = target_error(reference.engine, int(batch.request_ids[index]), self.round, tokens)
                if error.part is not None:
                    raise error

    def _advance(self, name: str, implementation: Implementation, call: str, batch: Batch) -> Any:
        """Advance one implementation; an error is a divergence, also where the reference raises it."""
        try:
            return implementation.advance(call, deepcopy(batch))
        except (InputError, RankLost):
            raise
        except RanksDiffer as error:
            self._note([StepDifference(call, None, Mismatch("rank digests", "equal", str(error)))])
            raise Diverged from error
        except Exception as error:
            self._note([StepDifference(call, None, Mismatch("error", None, f"{name}: {with_location(error)}"))])
            raise Diverged from error

    def _note(self, differences: Iterable[StepDifference]) -> None:
        for phase, request, wrong in differences:
            values = (wrong.node, wrong.field, wrong.reference, wrong.fast)
            self.divergences.append(Divergence(self.cell.id, self.round, phase, request, *values))
        if self.divergences and not self.tally.is_perturbation:
            raise Diverged

    def _hand_over(self) -> None:
        for implementation in self.engines[1:]:
            implementation.take_over(self.implementations.reference)
        for tested in self.tested:
            tested.not_compared.clear()

    def _realign(self) -> None:
        """Hand over after a request has diverged by rounding."""
        if any(tested.not_compared for tested in self.tested):
            self._hand_over()

    def _prefill(self, requests: list[Request]) -> Batch:
        """Prefill every prompt in the cell's number of chunks, over pools filled with NaN."""
        lengths = [len(request.prompt_ids) for request in requests]
        rows: list[int] = []
        for implementation in self.engines:
            for kv in filter(None, (implementation.pools.target, implementation.pools.draft)):
                empty(kv)
            rows = [implementation.pools.open() for _ in requests]
            for row, length in zip(rows, lengths, strict=True):
                implementation.pools.reserve(row, length + columns_ahead(implementation.engine.drafter))
        for request, row in zip(requests, rows, strict=True):
            request.row = row
        ids = [request.request_id for request in requests]
        params = [request.params for request in requests]
        vocab_size = self.implementations.reference.engine.target.config.vocab_size
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
        self._realign()
        return batch

    def _prefill_part(self, prompts: list[list[int]], part: int, batch: Batch) -> PrefillOutput:
        """Prefill chunk `part` of every prompt; the token after it is known except after the last."""
        chunks = self.cell.chunks
        bounds = [(len(p) * part // chunks, len(p) * (part + 1) // chunks) for p in prompts]
        chunks_input = PrefillInput.of_prompts([p[low:high] for p, (low, high) in zip(prompts, bounds, strict=True)])
        next_tokens = [p[high] if high < len(p) else -1 for p, (_, high) in zip(prompts, bounds, strict=True)]
        starts, ends = map(torch.tensor, zip(*bounds, strict=True))
        prefill = replace(chunks_input, start_lens=starts, next_tokens=torch.tensor(next_tokens))
        for implementation in self.engines:
            implementation.state = prefill.to(implementation.device)
        return self._step(("prefill",), replace(batch, seq_lens=ends))["prefill"].reference

    def _drop_finished(self, running: list[Request], batch: Batch) -> tuple[list[Request], Batch]:
        """Drop finished requests, as generation does; every implementation closes the same rows."""
        unfinished = [index for index, request in enumerate(running) if not request.finish_reason]
        indices = torch.tensor(unfinished, dtype=torch.int64)
        for implementation in self.engines:
            for request in running:
                if request.finish_reason:
                    implementation.pools.close(request.row)
            implementation.state = implementation.state.filter(indices.to(implementation.device))
        return [running[index] for index in unfinished], batch.filter(indices)

    def _close(self, running: list[Request]) -> None:
        """Require every page to be free again after the last round."""
        for implementation in self.engines:
            for request in running:
                implementation.pools.close(request.row)
        for tested in self.tested:
            books = compare_books(self.implementations.reference.pools, tested.implementation.pools)
            balanced, expected, actual = books
            if not balanced or expected["free"] != expected["slots"]:
                self._note([StepDifference("close", None, Mismatch("page books", expected, actual))])

    def _run_idle(self, batch: Batch) -> None:
        """Run a round of no request: its states have no rows and the right types, and it writes nothing."""
        for implementation in self.engines:
            implementation.state = implementation.engine.drafter.idle()
        for step in self._steps():
            self._step(step, batch.filter(torch.empty(0, dtype=torch.int64)))

    def _steps(self) -> list[tuple[str, ...]]:
        """Group the phases of a round by calls of an engine."""
        return [PHASES] if self.cell.graph == "round" else [(phase,) for phase in PHASES]


def _of_ranks(tested: TestedImplementation, differences: list[StepDifference]) -> list[StepDifference]:
    """Give the differences of the first rank that has any, and the requests that diverged on one of the ranks."""
    ranks = tested.implementation.ranks
    if ranks is None:
        return differences
    gathered = ranks.gather_objects((differences, tested.not_compared))
    tested.not_compared |= set().union(*(not_compared for _, not_compared in gathered))
    return next((rank_differences for rank_differences, _ in gathered if rank_differences), [])


def _same_bits(first: Any, second: Any) -> bool:
    """Whether two states are equal bit for bit, NaN included."""
    if isinstance(first, State):
        return all(_same_bits(getattr(first, part.name), getattr(second, part.name)) for part in fields(first))  # pyright: ignore[reportArgumentType]  # every State is a dataclass
    if isinstance(first, tuple):
        return all(map(_same_bits, first, second))
    if not isinstance(first, torch.Tensor):
        return first == second
    return torch.equal(*(part.contiguous().flatten().view(torch.uint8) for part in (first, second)))
