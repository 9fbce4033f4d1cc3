"""Best settings of every load among the rows of a sweep."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specsim.simulator.measurement import METRICS
from specsim.simulator.replicates import EQUAL
from specsim.simulator.request_formats import read_requests
from specsim.simulator.sweep import FIELDS

CHOSEN = (  # fields that an operator chooses; the others, except the seed, are the load
    "topk",
    "num_steps",
    "num_draft_tokens",
    "page_size",
    "schedule",
    "plain_schedule",
    "prefill",
    "chunk_tokens",
    "max_running",
    "memory_share",
    "adaptive",
)
GIVEN = tuple(name for name in FIELDS if name not in (*CHOSEN, "seed"))

Row = Mapping[str, Any]


def rank_by_load(rows: Iterable[Row]) -> list[list[dict[str, Any]]]:
    """Rank the settings of every load, best first.

    A setting has the means of its rows over seeds; rows with errors are dropped. The best has the highest throughput,
    or the lowest mean latency where requests arrive at a rate or at times of a file. Settings within EQUAL of it count
    as equal: they come first, the cheapest of them at the head.
    """
    loads: dict[tuple, dict[tuple, list[Row]]] = {}
    for row in rows:
        if row["error"] is None:
            load = loads.setdefault(tuple(row[name] for name in GIVEN), {})
            load.setdefault(tuple(row[name] for name in CHOSEN), []).append(row)
    return [_ranking([_means(same) for same in load.values()]) for load in loads.values()]


def _means(rows: Sequence[Row]) -> dict[str, Any]:
    """Make the row of a setting, with the means of its metrics over seeds."""
    known = {name: [row[name] for row in rows if row[name] is not None] for name in METRICS}
    return {**rows[0], **{name: float(np.mean(values)) if values else None for name, values in known.items()}}


def _ranking(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    least = min(map(_cost, rows))
    return sorted(rows, key=lambda row: _rank(_cost(row) / least - 1, row))


def _cost(row: Row) -> float:
    return row["Mean E2E Latency (ms)"] if _has_times(row) else 1 / row["Output Throughput (tok/s)"]


def _has_times(row: Row) -> bool:
    """Whether requests arrive at a rate, or at the times of a file."""
    if row["rate"] is not None or row.get("trace") is None:
        return row["rate"] is not None
    return read_requests(row["trace"], row["tokenizer"], row["characters_per_token"]).arrivals_s is not None


def _rank(regret: float, row: Row) -> tuple[float, ...]:
    if regret > EQUAL:
        return (1, regret)
    steps = row["num_steps"]
    nodes = steps + 1 if row["num_draft_tokens"] is None or not steps else row["num_draft_tokens"]
    return (0, nodes, steps, row["topk"])
