"""Reader of AIPerf's exports: records of requests (profile_export.jsonl), and the pooled histogram of a run.

https://docs.nvidia.com/aiperf/reference/per-request-speculative-decoding-acceptance
"""

from collections.abc import Mapping
from typing import Any

from specsim.acceptance.content import Content, dense, reported, request_counts
from specsim.core.limits import MOST_STEPS
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts

FORMAT = "AIPerf's profile_export.jsonl (spec_decode_acceptance) and profile_export_aiperf.json"
CONVENTION = (
    "acceptance_histogram counts verify steps by accepted drafts, without the bonus token, which "
    "mean_acceptance_length includes."
)
_POOLED = "pooled_spec_decode_acceptance_histogram"


def read(content: Content) -> list[AcceptanceRecord]:
    """Read the records of requests, or else the pooled histogram; [] for another file."""
    values = [entry["spec_decode_acceptance"] for entry in content.objects("spec_decode_acceptance")]
    requests = [value for value in values if isinstance(value, Mapping)]
    if requests:
        counts = [request_counts(content, request) for request in requests]
        steps = max(content.count(request, "num_spec_tokens", most=MOST_STEPS) or 0 for request in requests)
        engines = {str(request["engine"]) for request in requests if request.get("engine")}
        tool = " ".join(["aiperf", *sorted(engines)])
        stated = reported(content, requests, counts)
        return [_record(content, counts, tool, max(steps, *map(_depth, counts)), True, **stated)]
    return [_pooled(content, entry) for entry in content.objects(_POOLED)]


def _pooled(content: Content, value: Mapping[str, Any]) -> AcceptanceRecord:
    pooled = value[_POOLED]
    histogram = pooled.get("histogram", pooled) if isinstance(pooled, Mapping) else pooled
    counts = Counts.of_histogram(dense(content, histogram))
    return _record(content, [counts], "aiperf", _depth(counts), False)


def _record(
    content: Content, counts: list[Counts], tool: str, steps: int, by_request: bool, **stated: Any
) -> AcceptanceRecord:
    return AcceptanceRecord.of_counts(
        counts, content.source, tool, CONVENTION, num_steps=steps or None, is_by_request=by_request, **stated
    )


def _depth(counts: Counts) -> int:
    return len(counts.by_position)
