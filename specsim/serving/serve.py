"""Serving of a list of requests to their ends, its totals, and the audit of its slots."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from tqdm.auto import tqdm

from specsim.core.arguments import check_arguments
from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.display import acceptance_rows, figure, heading, paragraph, print_table, rounds_text, setting
from specsim.core.engine import Engine
from specsim.core.files import without_nan
from specsim.core.metrics import Acceptance, Latency, acceptance, latency
from specsim.core.policies.named import NamedPolicy
from specsim.core.rule import AcceptanceRule
from specsim.core.synthetic_acceptance import SyntheticAcceptance, acceptance_json
from specsim.serving.adaptation import Switching, settings_of
from specsim.serving.requests import Request
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import Trace
from specsim.serving.workload import SkippedLine

HEADINGS = ("id", "prompt", "reused", "new", "finish", "rounds", "TTFT", "TPOT", "ITL", "preempted", "text")


@dataclass(frozen=True, slots=True)
class Audit:
    """Pool audits, after every step and at the end."""

    num_audits: int  # number of audits
    audited_slots: int  # slots accounted for, over all audits
    at_end: dict[str, int]  # KVPool.usage after the last request, with every slot free


@dataclass(frozen=True, slots=True)
class Served:
    """The result of a run: its finished requests, and a record of every step."""

    requests: tuple[Request, ...]
    trace: Trace
    audit: Audit
    config: SpecConfig
    serving: ServingConfig
    seconds: float  # wall-clock, with audits, without loading
    skipped: tuple[SkippedLine, ...] = ()  # lines of the file that are not requests
    synthetic: SyntheticAcceptance | None = None  # decided acceptance in place of the target: not lossless
    rule: AcceptanceRule | None = None  # decided acceptance in place of the setting's verifier
    switching: Switching | None = None  # rounds by setting, where a policy chose them

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance over all rounds whose tokens went to a request."""
        drafts = [count - 1 for request in self.requests for count in request.accepted]
        depths = [depth for request in self.requests for depth in request.proposed]
        nodes = self.config.num_draft_tokens if self.switching is None else self.switching.mean_nodes
        return acceptance(drafts, self.config.num_steps, nodes, depths)

    @property
    def totals(self) -> dict[str, Any]:
        """Requests by finish reason, counts of the trace, tokens kept, seconds, and the acceptance of core.metrics.

        num_prefilled includes columns that preempted requests computed again. Skipped steps are not counted.
        """
        counts = self.trace.counts()
        tokens = sum(len(request.token_ids) for request in self.requests)
        return {
            "requests": len(self.requests),
            "finish_reasons": dict(sorted(Counter(request.finish_reason for request in self.requests).items())),
            "steps": counts["steps"],
            "prefill_steps": sum(bool(record.prefilled) for record in self.trace.records),
            **{name: counts[name] for name in ("num_prefilled", "num_reused")},
            "num_preemptions": counts["preempted"],
            "num_aborts": counts["aborted"],
            "evicted_pages": counts["evicted_pages"],
            "tokens": tokens,
            "seconds": self.seconds,
            "tokens_per_s": tokens / self.seconds,
            **asdict(self.acceptance),
        }

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON value, in which undefined metrics are null.

        Trace.from_json reads `trace`.
        """
        value = {
            "outputs": list(map(_output, self.requests)),
            "totals": self.totals,
            "audit": asdict(self.audit),
            "config": asdict(self.config),
            "acceptance": acceptance_json(self.synthetic, self.rule and self.rule.name),
            "serving": asdict(self.serving),
            "skipped": [{"line": line, "reason": reason} for line, reason in self.skipped],
            "adaptive": self.switching and self.switching.to_json(),
            "trace": self.trace.to_json(),
        }
        return without_nan(value)

    def show(self, console: Console) -> None:
        """Print one line for each request, the totals, and the audit."""
        heading(console, "Requests (TTFT, TPOT and ITL in steps)")
        print_table(console, HEADINGS, list(map(_cells, self.requests)))
        sentences = [
            f"Request {request.request_id} is rejected: {request.error}." for request in self.requests if request.error
        ]
        sentences += [f"Line {line} is skipped: not {reason}." for line, reason in self.skipped]
        for sentence in sentences:
            paragraph(console, sentence)
        heading(console, "Totals")
        print_table(console, (), self._rows())
        slots = self.audit.at_end
        console.print()
        paragraph(
            console,
            f"{figure(self.audit.num_audits, 0)} audits accounted for {figure(slots['slots'], 0)} slots each; "
            f"after the last request {figure(slots['free'], 0)} are free.",
        )

    def _rows(self) -> list[tuple[str, str]]:
        totals = self.totals
        serving = self.serving
        reasons = ", ".join(f"{count} {reason}" for reason, count in totals["finish_reasons"].items())
        cache = "with" if serving.prefix_cache else "no"
        counted = [("steps", "steps"), ("steps with prefill", "prefill_steps"), ("tokens prefilled", "num_prefilled")]
        counted += [("tokens reused", "num_reused"), ("preemptions", "num_preemptions"), ("aborts", "num_aborts")]
        counted += [("pages evicted", "evicted_pages"), ("new tokens", "tokens")]
        return [
            ("setting", setting(self.config, self.rule)),
            ("serving", f"{serving.schedule}, {cache} prefix cache, at most {serving.max_running} at a time"),
            ("requests", f"{totals['requests']}: {reasons}"),
            *((name, figure(totals[key], 0)) for name, key in counted),
            ("rounds", rounds_text(totals["rounds"], totals["undrafted_rounds"])),
            *acceptance_rows(self.acceptance, self.synthetic),
            *(self.switching.rows() if self.switching else ()),
            ("seconds", figure(totals["seconds"])),
            ("tokens a second", figure(totals["tokens_per_s"], 1)),
        ]


@check_arguments
def serve(
    engine: Engine,
    requests: Sequence[Request],
    serving: ServingConfig | None = None,
    *,
    policy: NamedPolicy | None = None,
    skipped: Sequence[SkippedLine] = (),
    progress: bool = False,
) -> Served:
    """Serve new requests to their ends on an engine of either implementation, with a pool audit after every step.

    policy: whose settings the engine has. Requests are advanced in place, so the same ones cannot be served again.
    Raises InputError for a schedule or slots that the engine cannot run with, and for ids or conversations that do not
    fit together.
    """
    serving = serving or ServingConfig()
    start = time.perf_counter()
    total = sum(min(request.max_tokens, engine.config.length_limit) for request in requests)
    scheduler = Scheduler(engine, serving, policy=policy and policy.make(), audits=True)
    for request in requests:
        scheduler.submit(request)
    quiet = None if progress else True
    with torch.inference_mode(), tqdm(desc="serving", total=total, unit="token", leave=False, disable=quiet) as bar:
        scheduler.run(lambda: bar.update(sum(len(request.token_ids) for request in requests) - bar.n))
        at_end = scheduler.close()
    return Served(
        requests=tuple(requests),
        trace=scheduler.trace,
        audit=Audit(len(scheduler.trace) + 1, scheduler.audited_slots + at_end["slots"], at_end),
        config=max(settings_of(engine), key=lambda config: config.num_steps),
        serving=serving,
        seconds=time.perf_counter() - start,
        skipped=tuple(skipped),
        synthetic=engine.acceptance,
        rule=engine.rule,
        switching=policy and Switching.of(policy, requests, scheduler.choices),
    )


def _latency(request: Request) -> Latency:
    return latency(request.arrived, request.emissions)


def _output(request: Request) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "arrival": request.arrival,
        "priority": request.priority,
        "continues": request.continues,
        "text": request.text,
        "token_ids": request.token_ids,
        "logprobs": request.logprobs,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "error": request.error,
        "num_accepted_tokens_per_round": request.accepted,
        "prompt_tokens": len(request.prompt_ids),
        "prompt_token_ids": request.prompt_ids,
        "temperature": request.params.temperature,
        "num_reused": request.num_reused,
        "num_preemptions": request.num_preemptions,
        "emissions": request.emissions,
        "latency": asdict(_latency(request)),
    }


def _cells(request: Request) -> tuple[str | Text, ...]:
    times = _latency(request)
    text = repr(request.text)[1:-1] or " ".join(map(str, request.token_ids))
    return (
        str(request.request_id),
        str(len(request.prompt_ids)),
        str(request.num_reused),
        str(len(request.token_ids)),
        request.finish_reason or "",
        str(len(request.accepted)),
        figure(times.ttft_steps, 0),
        figure(times.tpot_steps),
        figure(times.itl_steps),
        str(request.num_preemptions),
        Text(text, no_wrap=True, overflow="ellipsis"),
    )
