"""Requests in company against each of them alone, or against the same batch without padding: tokens, rounds, drafts,
the state that a round starts from, and the KV that it leaves. And every slot is accounted for after every step.

What both columns share, and what is right alone, is not seen by comparing columns.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.phases import Advance, Batch, DraftInput
from specsim.core.pool import KVPool, OutOfSlots
from specsim.correctness.differential import Cell
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.faults.checks.cells import cell
from specsim.correctness.faults.fault import Finding
from specsim.serving.generation import load_engine
from specsim.serving.requests import Request, make_requests
from specsim.serving.scheduler import Scheduler

OWN = ("impl", "arrivals", "ids", "limits", "against", "schedule", "prefix_cache", "max_running", "slots", "prompts")
ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-3}  # of what is compared; a fault is no subtlety
Notes = dict[tuple[int, int], dict[str, torch.Tensor]]


class Misfit(Exception):
    """A draft input with other rows than its batch."""


@dataclass(slots=True)
class Witness:
    """An engine whose rounds are noted, by (request id, how many rounds it has had)."""

    engine: Any
    notes: Notes = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        """A round, as the engine's own advance gives it."""
        if len(draft_input.topk_index) != batch.size:
            raise Misfit(f"{len(draft_input.topk_index)} rows for a batch of {batch.size}")
        tree, verdict, following = self.engine.round(batch, draft_input, pools, reserved)
        counts = verdict.num_accepted_tokens
        for place, (request_id, num_rounds) in enumerate(
            zip(batch.request_ids.tolist(), batch.num_rounds.tolist(), strict=True)
        ):
            row, end = int(batch.req_pool_indices[place]), int(batch.seq_lens[place] + counts[place])
            slots = pools.req_to_token[row, :end]
            self.notes[request_id, num_rounds] = {
                **{f"draft state, {name}": rows[place].clone() for name, rows in draft_input.tensors.items()},
                "draft tokens": tree.draft_tokens[place].clone(),
                "counters": counts[place].clone(),
                "accepted tokens": torch.tensor(verdict.accepted_tokens()[place]),
                "target KV": pools.target.keys[:, slots].clone(),
                **({} if pools.draft is None else {"draft KV": pools.draft.keys[:, slots].clone()}),
            }  # fmt: skip
        return Advance(verdict, following, batch.after(counts))


@torch.inference_mode()
def judge(setting: dict[str, Any], device: str) -> list[Finding]:
    """setting: of a cell (checks.cells), and impl; against `alone` or `exact`; of every request when it
    arrives, its id, and a prompt that is `own` or `equal`; of the server schedule, prefix_cache, max_running, slots,
    limits [(step, slots)].
    """
    case = cell({name: value for name, value in setting.items() if name not in OWN})
    if setting.get("prompts") == "equal":
        case = replace(case, prompts=(case.prompts[0],) * len(case.prompts))
    dtype = torch.float64 if setting["impl"] == "reference" else torch.float32
    pair = make_pair(case.pair, dtype)
    found: dict[str, Finding] = {}
    served, notes = _serve(pair, case, setting, dtype, device, case.bucket, found)
    if found:  # an error ended it
        return list(found.values())
    if setting.get("against") == "exact":
        expected, alone = _serve(pair, case, setting, dtype, device, len(case.prompts), {})
    else:
        expected, alone = _alone(pair, case, setting, dtype, device)
    _compare_notes(alone, notes, ALLOWED[dtype], found)
    _compare_ends(expected, served, found)
    return list(found.values())


def _requests(pair, case: Cell, setting: dict[str, Any], config) -> list[Request]:
    ids = setting.get("ids", range(len(case.prompts)))
    requests = make_requests(pair, case.prompts, list(case.sampling), list(ids), config.max_len)
    for request, arrival in zip(requests, setting.get("arrivals", [0] * len(requests)), strict=True):
        request.arrival = arrival
    return requests


def _engine(pair, case: Cell, setting: dict[str, Any], dtype, device: str, bucket: int | None):
    options = EngineOptions(setting["impl"], dtype)
    if options.impl == "fast":
        options = replace(options, device=device, graph=case.graph, bucket=bucket)
    return Witness(load_engine(pair, case.config, options))


def _serve(
    pair, case: Cell, setting: dict[str, Any], dtype, device: str, bucket: int | None, found: dict[str, Finding]
) -> tuple[list[Request], Notes]:
    witness = _engine(pair, case, setting, dtype, device, bucket)
    requests = _requests(pair, case, setting, witness.config)
    longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
    names = {name: setting[name] for name in ("schedule", "prefix_cache") if name in setting}
    room = setting.get("slots", len(requests) * witness.config.reserved_columns(longest))
    serving = ServingConfig(max_running=setting.get("max_running", len(requests)), num_slots=room, **names)
    scheduler, limits = Scheduler(witness, serving, audits=True), dict(setting.get("limits", ()))
    for request in requests:
        scheduler.submit(request)
    try:
        while scheduler.is_busy:
            if scheduler.step_index in limits:
                scheduler.limit(limits[scheduler.step_index])
            scheduler.step()
        scheduler.close()
    except Exception as error:
        name = {AssertionError: "allocator balance", Misfit: "next merge", OutOfSlots: "out of bounds"}
        place, told = f"step {scheduler.step_index}", f"{type(error).__name__}: {error}"
        found[name.get(type(error), "error")] = Finding(name.get(type(error), "error"), place, None, told)
    return requests, witness.notes


def _alone(pair, case: Cell, setting: dict[str, Any], dtype, device: str) -> tuple[list[Request], Notes]:
    """Every request by itself, one after the other on one engine."""
    witness = _engine(pair, case, setting, dtype, device, None)
    requests = _requests(pair, case, setting, witness.config)
    for request in requests:
        request.arrival = 0
        room = witness.config.reserved_columns(len(request.prompt_ids) + request.max_tokens)
        scheduler = Scheduler(witness, ServingConfig(max_running=1, num_slots=room))
        scheduler.submit(request)
        scheduler.run()
    return requests, witness.notes


def _compare_notes(expected: Notes, notes: Notes, allowed: float, found: dict[str, Finding]) -> None:
    for request_id, num_rounds in sorted(notes.keys() & expected.keys(), key=lambda key: key[::-1]):
        right, own = expected[request_id, num_rounds], notes[request_id, num_rounds]
        for name in right:
            if values := _first_wrong(right[name], own[name], allowed):
                place = f"request {request_id}, round {num_rounds + 1}, {name}"
                field_name = name.partition(",")[0]
                found.setdefault(field_name, Finding(field_name, place, *values))


def _first_wrong(right: torch.Tensor, own: torch.Tensor, allowed: float) -> tuple[Any, Any] | None:
    """Both values where they first differ, or all of them where those are few; None where they agree."""
    if right.shape != own.shape:
        return str(tuple(right.shape)), str(tuple(own.shape))
    if not right.is_floating_point():
        return None if torch.equal(right, own) else (str(right.tolist()), str(own.tolist()))
    scale = max(1.0, float(right.abs().max())) if right.numel() else 1.0
    wrong = ~((right - own).abs() <= allowed * scale)
    return (right[wrong][0].item(), own[wrong][0].item()) if wrong.any() else None


def _compare_ends(expected: list[Request], served: list[Request], found: dict[str, Finding]) -> None:
    for right, own in zip(expected, served, strict=True):
        for name, ours, theirs in (
            ("tokens", right.token_ids, own.token_ids),
            ("finish reason", right.finish_reason, own.finish_reason),
        ):
            if ours != theirs:
                found.setdefault(name, Finding(name, f"request {own.request_id}", str(ours), str(theirs)))
