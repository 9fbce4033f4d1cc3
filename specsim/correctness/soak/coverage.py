"""Coverage of a serving run: events that have to occur before a run without failures means anything."""

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import pairwise

from specsim.serving.requests import Request
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import StepRecord

# With every count of accepted drafts, as `accepted_name` names them.
REQUIRED = (
    "finished stop",
    "finished length",
    "finished abort",
    "rejected",
    "aborted",
    "aborted with tokens",
    "preempted",
    "preempted in a page",
    "preempted in a chunk",
    "preempted with a result unread",
    "resumed",
    "turns",
    "turns on kept KV",
    "turns preempted",
    "reused columns",
    "shared pages",
    "evicted pages",
    "prefill chunks",
    "cut inside a path",
    "late results dropped",
    "batches emptied",
    "steps with slots withheld",
)


def required(
    counts: Mapping[str, int], num_steps: Collection[int] = (), names: Collection[str] = REQUIRED
) -> tuple[str, ...]:
    """Names of required events that never occurred.

    num_steps: depths of the trees in use. At each depth every count of accepted drafts has to occur, as `accepted
    drafts i of num_steps`.
    """
    accepted = [accepted_name(count, depth) for depth in sorted(num_steps) for count in range(depth + 1)]
    return tuple(name for name in (*names, *accepted) if not counts.get(name))


def accepted_name(count: int, num_steps: int) -> str:
    """Name the count of rounds of that depth that accepted that many drafts."""
    return f"accepted drafts {count} of {num_steps}"


def verified_name(verifier: str) -> str:
    """Name the count of requests whose drafts that verifier verified."""
    return f"verified by {verifier}"


def drafted_name(kind: str) -> str:
    """Name the count of accepted drafts of that kind of drafter."""
    return f"accepted drafts of {kind}"


def coverage_of(scheduler: Scheduler) -> Counter[str]:
    """Count the events of a scheduler's run, by the names in REQUIRED and those of a few totals.

    prefill chunks: chunks that continued another one. turns on kept KV: turns that found all columns of their
    conversation; with a prefix tree only those that end inside a page, which no tree holds. shared pages: pages that
    admission took over from the tree. preempted in a chunk: preemptions before the prefill was complete, with some of
    its columns filled. late results dropped: results of requests that had ended. accepted drafts i: results that were
    kept at least in part.
    """
    requests = scheduler.requests.values()
    records = scheduler.trace.records
    num_tokens = sum(len(request.token_ids) for request in requests)
    counts = Counter(steps=len(records), requests=len(requests), tokens=num_tokens)
    counts["slots audited"] = scheduler.audited_slots
    counts["audits"] = len(records) if scheduler.audited_slots else 0
    reasons = (request.finish_reason for request in requests)
    counts.update(f"finished {reason}" for reason in reasons if reason not in (None, "rejected"))
    turns = [request for request in requests if request.continues is not None]
    counts["turns"] = sum(request.finish_reason != "rejected" and request.arrived is not None for request in turns)
    counts["turns preempted"] = sum(request.num_preemptions > 0 for request in turns)
    aborted = [request for request in requests if request.finish_reason == "abort"]
    counts["aborted with tokens"] = sum(bool(request.token_ids) for request in aborted)
    for record in records:
        counts.update(_events(record))
        counts.update(_results(record))
    counts.update(_reuse(scheduler))
    counts["prefill chunks"] = _chunks(records)
    counts["batches emptied"] = sum(bool(a.decoded) and not b.decoded for a, b in pairwise(records))
    return counts


def _events(record: StepRecord) -> Counter[str]:
    late = {result.request_id for result in record.results if result.launched < record.step}
    return Counter(
        {
            "rejected": len(record.rejected),
            "aborted": len(record.aborted),
            "preempted": len(record.preempted),
            "preempted in a page": sum(victim.in_page for victim in record.preempted),
            "preempted in a chunk": sum(victim.is_prefilling and victim.seq_len > 0 for victim in record.preempted),
            "preempted with a result unread": sum(victim.request_id in late for victim in record.preempted),
            "resumed": len(record.resumed),
            "evicted pages": record.evicted_pages,
            "steps with slots withheld": record.withheld_slots > 0,
        }
    )


def _results(record: StepRecord) -> Counter[str]:
    counts = Counter()
    for result in record.results:
        counts["late results dropped"] += result.num_kept == 0
        counts["cut inside a path"] += 0 < result.num_kept < result.num_accepted_tokens
        counts[f"accepted drafts {result.num_accepted_tokens - 1}"] += result.num_kept > 0
        counts["drafts accepted"] += (result.num_accepted_tokens - 1) * (result.num_kept > 0)
    return counts


def _reuse(scheduler: Scheduler) -> Counter[str]:
    counts = Counter()
    page_size = scheduler.pools.page_size
    seen = set()
    for record in scheduler.trace.records:
        for request_id, columns in record.reused:
            counts["reused columns"] += columns
            on_kept = request_id not in seen and _is_on_kept_kv(scheduler, scheduler.requests[request_id], columns)
            counts["turns on kept KV"] += on_kept
            counts["shared pages"] += 0 if on_kept or not scheduler.serving.prefix_cache else columns // page_size
        seen.update(record.admitted)
    return counts


def _is_on_kept_kv(scheduler: Scheduler, request: Request, columns: int) -> bool:
    """Whether the columns that a first admission reused can only be those of the request it continues."""
    previous = None if request.continues is None else scheduler.requests.get(request.continues)
    if previous is None or columns != previous.prefill_len:
        return False
    return not scheduler.serving.prefix_cache or columns % scheduler.pools.page_size != 0


def _chunks(records: Collection[StepRecord]) -> int:
    ends = {}
    count = 0
    for record in records:
        for request_id in record.admitted:
            ends.pop(request_id, None)
        for chunk in record.prefilled:
            count += chunk.request_id in ends
            ends[chunk.request_id] = chunk.end
    return count
