"""Comparison of a batch's requests with their solo runs, or of the batch with the same one without padding.

Compared are tokens, rounds, drafts, the state at the start of a round, and the KV after it; slots are audited after
every step. So it detects faults that both implementations share, and faults that only a batch shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specsim.core.columns import two_rounds
from specsim.core.config import ServingConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.core.phases import Advance, Batch, DraftInput
from specsim.core.policies.named import NamedPolicy, named_policy
from specsim.core.pool import KVPool
from specsim.core.settings import with_steps
from specsim.correctness.differential import Cell
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.faults.checks.cells import cell
from specsim.correctness.faults.fault import FaultFinding
from specsim.correctness.invariance.solo import decided_differences
from specsim.serving.adaptation import settings_of
from specsim.serving.generation import load_adaptive_engine, load_engine
from specsim.serving.outputs import Output
from specsim.serving.requests import Request, make_requests
from specsim.serving.scheduler import Scheduler

OWN = (
    "impl",
    "arrivals",
    "ids",
    "limits",
    "against",
    "schedule",
    "prefix_cache",
    "max_running",
    "slots",
    "prompts",
    "script",
)
ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-3}  # of every compared value; faults cause larger errors
ERRORS = {
    "AssertionError": "allocator balance",
    "IndexError": "out of bounds",
    "Misfit": "next merge",
    "OutOfSlots": "out of bounds",
}
FIELDS = {"token_ids": "tokens", "finish_reason": "finish reason"}
Notes = dict[tuple[int, int], dict[str, torch.Tensor]]


class Misfit(Exception):
    """A draft input whose rows are not those of its batch."""


@dataclass(slots=True)
class NotingEngine:
    """An engine that records its rounds."""

    engine: Engine
    notes: Notes = field(default_factory=dict)  # by (request id, number of its earlier rounds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        """Run a round as the engine's own advance does."""
        if len(draft_input.bonus_tokens) != batch.size:
            raise Misfit(f"{len(draft_input.bonus_tokens)} rows for a batch of {batch.size}")
        output = self.engine.round(batch, draft_input, pools, reserved)
        tree, verified, _ = output
        verdict = verified.verdict
        counts = verdict.num_accepted_tokens
        for index, (request_id, num_rounds) in enumerate(
            zip(batch.request_ids.tolist(), batch.num_rounds.tolist(), strict=True)
        ):
            row = int(batch.req_pool_indices[index])
            end = int(batch.seq_lens[index] + counts[index])
            slots = pools.req_to_token[row, :end]
            self.notes[request_id, num_rounds] = {
                **{f"draft state, {name}": rows[index].clone() for name, rows in draft_input.tensors.items()},
                "draft tokens": tree.draft_tokens[index].clone(),
                "counters": counts[index].clone(),
                "accepted tokens": torch.tensor(verdict.accepted_tokens()[index]),
                "target KV": pools.target.keys[:, slots].clone(),
                **({} if pools.draft is None else {"draft KV": pools.draft.keys[:, slots].clone()}),
            }  # fmt: skip
        return output.advance(batch)


@dataclass(frozen=True, slots=True)
class CellServing:
    """The requests of a cell, and the way they are served."""

    pair: Pair
    case: Cell
    setting: dict[str, Any]
    options: EngineOptions

    def requests(self, max_len: int) -> list[Request]:
        """Make the requests, with their ids and arrivals."""
        ids = list(self.setting.get("ids", range(len(self.case.prompts))))
        requests = make_requests(self.pair, self.case.prompts, list(self.case.sampling), ids, max_len)
        for request, arrival in zip(requests, self.setting.get("arrivals", [0] * len(requests)), strict=True):
            request.arrival = arrival
        return requests

    def engine(self, bucket: int | None) -> Any:
        """Load an engine of its own, in a NotingEngine; bucket: of the fast implementation."""
        options = replace(self.options, bucket=bucket) if self.options.impl == "fast" else self.options
        if self.policy is not None:
            return NotingEngine(load_adaptive_engine(self.pair, self.policy.settings, options))
        return NotingEngine(load_engine(self.pair, self.case.config, options))

    @property
    def policy(self) -> NamedPolicy | None:
        """The policy that gives each round of the batch its steps, None for a fixed setting."""
        script = self.setting.get("script")
        return named_policy({"policy": "scripted", "script": script}, self.case.config) if script else None

    def plain(self) -> "CellServing":
        """Make the same requests without drafts."""
        others = {name: value for name, value in self.setting.items() if name != "script"}
        return replace(self, case=replace(self.case, config=with_steps(self.case.config, 0)), setting=others)

    def batched(self, bucket: int | None, findings: dict[str, FaultFinding]) -> tuple[list[Request], Notes]:
        """Serve all requests together in the given setting; an error becomes a finding."""
        engine = self.engine(bucket)
        requests = self.requests(engine.config.max_len)
        longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        names = {name: self.setting[name] for name in ("schedule", "prefix_cache") if name in self.setting}
        ahead = engine.drafter.num_mask_rows
        columns = max(two_rounds(longest, config, ahead) for config in settings_of(engine))
        room = self.setting.get("slots", len(requests) * columns)
        serving = ServingConfig(max_running=self.setting.get("max_running", len(requests)), num_slots=room, **names)
        scheduler = Scheduler(engine, serving, policy=self.policy and self.policy.make(), audits=True)
        limits = dict(self.setting.get("limits", ()))
        for request in requests:
            scheduler.submit(request)
        try:
            while scheduler.is_busy:
                if scheduler.step_index in limits:
                    scheduler.limit(limits[scheduler.step_index])
                scheduler.step()
            scheduler.close()
        except Exception as error:
            name = ERRORS.get(type(error).__name__, "error")
            message = f"{type(error).__name__}: {error}"
            findings[name] = FaultFinding(name, f"step {scheduler.step_index}", None, message)
        return requests, engine.notes

    def solo(self) -> tuple[list[Request], Notes]:
        """Serve every request by itself, one after the other on the same engine."""
        engine = self.engine(None)
        requests = self.requests(engine.config.max_len)
        for request in requests:
            request.arrival = 0
            longest = len(request.prompt_ids) + request.max_tokens
            room = two_rounds(longest, engine.config, engine.drafter.num_mask_rows)
            scheduler = Scheduler(engine, ServingConfig(max_running=1, num_slots=room))
            scheduler.submit(request)
            scheduler.run()
        return requests, engine.notes


@torch.inference_mode()
def check(setting: dict[str, Any], device: str) -> list[FaultFinding]:
    """Serve a cell's requests in a batch, and compare them with solo runs or with an unpadded batch.

    setting: of a cell (checks.cells) and impl; against `exact` (no padding) or `plain` (ends of solo runs without
    drafts), else solo runs; of every request its arrival, its id, and a prompt that is `own` or `equal`; of the server
    schedule, prefix_cache, max_running, slots, limits [(step, slots)], and a script of steps by round.
    """
    case = cell({name: value for name, value in setting.items() if name not in OWN})
    if setting.get("prompts") == "equal":
        case = replace(case, prompts=(case.prompts[0],) * len(case.prompts))
    if setting["impl"] == "reference":
        options = EngineOptions(dtype=torch.float64)
    else:
        options = EngineOptions("fast", torch.float32, device, case.graph)
    run = CellServing(make_pair(case.pair, options.dtype), case, setting, options)
    findings: dict[str, FaultFinding] = {}
    served, notes = run.batched(case.bucket, findings)
    if findings:  # ended by an error
        return list(findings.values())
    if setting.get("against") == "plain":
        expected, right_notes = run.plain().solo()
    else:
        expected, right_notes = run.batched(len(case.prompts), {}) if setting.get("against") == "exact" else run.solo()
        _compare_notes(right_notes, notes, ALLOWED[options.dtype], findings)
    _compare_ends(expected, served, findings)
    return list(findings.values())


def _compare_notes(expected: Notes, notes: Notes, allowed: float, findings: dict[str, FaultFinding]) -> None:
    for request_id, num_rounds in sorted(notes.keys() & expected.keys(), key=lambda key: key[::-1]):
        right = expected[request_id, num_rounds]
        actual = notes[request_id, num_rounds]
        for name in right:
            if values := _first_wrong(right[name], actual[name], allowed):
                location = f"request {request_id}, round {num_rounds}, {name}"
                field_name = name.partition(",")[0]
                findings.setdefault(field_name, FaultFinding(field_name, location, *values))


def _first_wrong(right: torch.Tensor, actual: torch.Tensor, allowed: float) -> tuple[Any, Any] | None:
    """Return both values where they first differ, or all values where there are few; None where they agree."""
    if right.shape != actual.shape:
        return str(tuple(right.shape)), str(tuple(actual.shape))
    if not right.is_floating_point():
        return None if torch.equal(right, actual) else (str(right.tolist()), str(actual.tolist()))
    scale = max(1.0, float(right.abs().max())) if right.numel() else 1.0
    wrong = ~((right - actual).abs() <= allowed * scale)
    return (right[wrong][0].item(), actual[wrong][0].item()) if wrong.any() else None


def _compare_ends(expected: Sequence[Request], served: Sequence[Request], findings: dict[str, FaultFinding]) -> None:
    for right, actual in zip(expected, served, strict=True):
        counts = tuple(right.accepted)
        output = Output("", tuple(right.token_ids), tuple(right.logprobs), str(right.finish_reason), counts)
        for difference in decided_differences(actual, output):
            if name := FIELDS.get(difference.field):
                values = (str(difference.solo), str(difference.batched))
                findings.setdefault(name, FaultFinding(name, f"request {actual.request_id}", *values))
