"""Comparison of fast with the reference, phase by phase, and within the draft phase forward by forward.

A wrong drafter does not change tokens; fewer of its drafts are accepted. So the inputs of its forwards (positions,
slots, copies of the prefix's tail) and their logits are compared too, and the logits after penalties and bias.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from specsim.core.phases import Batch, VerifyInput, VerifyOutput
from specsim.core.pool import tail_columns
from specsim.correctness.differential.comparison import FLOAT32_EPS, Tally, Trio, budget
from specsim.correctness.differential.grid_run import perturbation_budgets
from specsim.correctness.differential.implementation import Implementation, load_implementations
from specsim.correctness.differential.lockstep import Lockstep
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.differential.result import Divergence
from specsim.correctness.faults.checks.cells import cell
from specsim.correctness.faults.fault import FaultFinding

PHASES = ("prefill", "draft", "verify", "draft_extend", "round")
BUDGETS = 16  # multiple of the rounding budgets; faults cause larger errors


@dataclass(slots=True)
class HeadForward:
    """One forward of a drafter's head."""

    positions: torch.Tensor  # of its rows, as the slots are
    slots: torch.Tensor
    logits: torch.Tensor | None = None  # made from its hidden states

    def copy(self) -> "HeadForward":
        """Copy it to the host."""
        logits = None if self.logits is None else self.logits.to("cpu", copy=True)
        return HeadForward(self.positions.to("cpu", copy=True), self.slots.to("cpu", copy=True), logits)


class HeadHook:
    """A drafter's head that records its forwards in `seen`."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self.seen: list[HeadForward] = []
        self.recorded: list[HeadForward] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor, metadata: Any, kv: Any) -> torch.Tensor:
        out = self._head.forward(input_ids, hidden, metadata, kv)
        # In a graph the copies are captured too, so that every replay repeats them.
        self.recorded.append(HeadForward(metadata.positions.clone(), metadata.slots.clone()))
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._head.logits(hidden)
        if self.recorded and self.recorded[-1].logits is None:
            self.recorded[-1].logits = out.clone()
        return out

    def take(self) -> list[HeadForward]:
        """Return the forwards since the last call."""
        seen = [*self.seen, *(forward.copy() for forward in self.recorded)]
        self.seen = []
        self.recorded = []
        return seen


class HookedGraph:
    """A graph that shows the forwards of its replays to a hook."""

    def __init__(self, graph: Any, hook: HeadHook, forwards: list[HeadForward]) -> None:
        self._graph = graph
        self._hook = hook
        self._forwards = forwards

    def replay(self) -> None:
        self._graph.replay()
        self._hook.seen += [forward.copy() for forward in self._forwards]


@contextmanager
def hooked(engine: Any) -> Iterator[HeadHook | None]:
    """Hook the drafter of an engine of either implementation; None where it has no head that runs in steps."""
    drafter = engine.drafter
    if drafter.block_rows or not hasattr(drafter, "_head"):
        yield None
        return
    hook = HeadHook(drafter._head)
    drafter._head = hook
    if engine.options.impl != "fast":
        yield hook
        return
    from specsim.fast import sections as module

    capture = module.capture

    def hooked_capture(work: Callable[[], None], device: torch.device) -> HookedGraph:
        def last_run() -> None:  # a capture may begin with a run that warms up
            hook.recorded.clear()
            work()

        hook.take()
        graph = capture(last_run, device)
        recorded = hook.recorded
        hook.recorded = []
        return HookedGraph(graph, hook, recorded)

    module.capture = hooked_capture
    try:
        yield hook
    finally:
        module.capture = capture


class Watched:
    """The fast engine; after each phase it is compared with the references."""

    def __init__(self, implementations: Trio[Implementation], hooks: Trio[HeadHook | None]) -> None:
        self._implementations = implementations
        self._hooks = hooks
        self._engine = implementations.fast.engine
        self.findings: dict[str, FaultFinding] = {}
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._engine, name)
        if name not in PHASES:
            return attribute

        def run(batch: Batch, state: Any, pools: Any) -> Any:
            output = attribute(batch, state, pools)
            self._calls += 1
            self._compare(name, batch.to("cpu"), state, output)
            return output

        return run

    def _compare(self, phase: str, batch: Batch, state: Any, output: Any) -> None:
        location = f"call {self._calls}, {phase}"
        if phase == "draft":
            self._compare_tails(location, batch)
        seen = [hook.take() for hook in self._hooks if hook is not None]
        if len(seen) == len(self._hooks):
            for index, forwards in enumerate(zip(*seen, strict=False)):
                is_draft = phase == "draft" or (phase == "round" and index < self._engine.config.num_steps - 1)
                self._compare_forward(f"{location}, forward {index}", Trio(*forwards), is_draft)
        if phase == "verify":
            self._compare_processed(location, batch, state, output)

    def _compare_tails(self, location: str, batch: Batch) -> None:
        """Compare the copied tails under release `finish`, where lanes still own slots after the phase."""
        config = self._engine.config
        bonus_columns = self._engine.drafter.bonus_columns
        pools = self._implementations.map(lambda implementation: implementation.pools)
        if config.release == "round" or pools.reference.draft is None:
            return
        for request, (row, length) in enumerate(batch.rows_and_lens):
            slots = pools.reference.slots(row, tail_columns(length + bonus_columns, config)[1:].flatten())
            for name in ("keys", "values"):
                content = pools.map(lambda pool, n=name, at=slots: _content(pool.draft, n, at))
                self._close("draft KV of copied tails", f"{location}, request {request}, {name}", content)

    def _compare_forward(self, location: str, forwards: Trio[HeadForward], is_draft: bool) -> None:
        rows = slice(len(forwards.reference.slots))
        all_logits = [forward.logits for forward in forwards if forward.logits is not None]
        live = torch.ones(min(map(len, all_logits), default=0), dtype=torch.bool)
        if is_draft:
            live = (forwards.reference.slots >= 0) | (self._engine.drafter.kv_layout is None)
            for name in ("slots", "positions"):
                pair = (getattr(forward, name)[rows] for forward in (forwards.reference, forwards.fast))
                self._same(f"draft {name}", location, *pair)
        if len(all_logits) == len(forwards):
            self._close("draft logits", location, Trio(*(logits[: len(live)][live] for logits in all_logits)))

    def _compare_processed(self, location: str, batch: Batch, tree: VerifyInput, output: VerifyOutput) -> None:
        """Compare logits after penalties and bias, made by both implementations from the same logits."""
        from specsim.fast import verify as fast
        from specsim.reference import verify as reference

        config = self._engine.config
        target_logits = output.target_logits
        device = target_logits.device
        host_tree = tree.to("cpu")
        pools = self._implementations.reference.pools
        shape = host_tree.draft_tokens.shape
        expected = reference.node_logits(batch, host_tree, target_logits.cpu(), config, pools).flatten(0, 1)
        fast_logits = fast.node_logits(
            batch.to(device), tree.to(device), target_logits, config, self._implementations.fast.pools
        )
        is_changed = (fast_logits.changed == 1).repeat_interleave(shape[1])[:, None]
        actual = torch.where(is_changed, fast_logits.adjusted, fast_logits.raw.float()).cpu()
        scale = float(expected[expected.isfinite()].abs().max()) if expected.numel() else 0.0
        allowed = BUDGETS * 16 * FLOAT32_EPS * scale
        self._note("processed logits", location, expected, actual, ~((actual - expected).abs() <= allowed))

    def _same(self, field: str, location: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
        self._note(field, location, expected, actual, expected != actual)

    def _close(self, field: str, location: str, values: Trio[torch.Tensor]) -> None:
        allowed = BUDGETS * budget(values.reference, values.exact, FLOAT32_EPS)
        exact = values.exact.double()
        fast = values.fast.double()
        self._note(field, location, exact, fast, ~((exact == fast) | ((exact - fast).abs() <= allowed)))

    def _note(
        self, field: str, location: str, expected: torch.Tensor, actual: torch.Tensor, wrong: torch.Tensor
    ) -> None:
        places = wrong.nonzero()
        if len(places) and field not in self.findings:
            at = tuple(places[0].tolist())
            where = f"{location}, entry {', '.join(map(str, at))}"
            self.findings[field] = FaultFinding(field, where, expected[at].item(), actual[at].item())


def _content(buffer: Any, name: str, slots: torch.Tensor) -> torch.Tensor:
    values = getattr(buffer, name)
    return values[:, slots.to(values.device)].cpu()


def check(setting: dict[str, Any], device: str) -> list[FaultFinding]:
    """Compare a cell in lockstep; setting: see checks.cells. Fields are those of states and of Watched."""
    return compared(setting, device)[0]


@torch.inference_mode()
def compared(setting: dict[str, Any], device: str) -> tuple[list[FaultFinding], list[Divergence]]:
    """Compare a cell in lockstep up to the first wrong phase.

    Returns all wrong fields, those of the drafter's forwards too and the first cause first, and the lockstep's own
    divergences.
    """
    case = cell(setting)
    pair = make_pair(case.pair, torch.float32)
    tally = Tally(budgets=perturbation_budgets(replace(case, rounds=min(case.rounds, 2)), pair, "float32"))
    loaded = load_implementations(case, pair, device=device)
    with ExitStack() as stack:
        hooks = loaded.map(lambda implementation: stack.enter_context(hooked(implementation.engine)))
        watched = Watched(loaded, hooks)
        lockstep = Lockstep(case, pair, loaded._replace(fast=replace(loaded.fast, engine=watched)), tally)
        lockstep.run()
    findings = dict(watched.findings)
    for wrong in lockstep.divergences:
        findings.setdefault(wrong.field, FaultFinding(wrong.field, wrong.location, wrong.reference, wrong.fast))
    return list(findings.values()), lockstep.divergences
