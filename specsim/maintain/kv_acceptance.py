"""Acceptance of the shipped pair with KV in fp8 and without: `python -m specsim.maintain.kv_acceptance`."""

import json
from itertools import product
from typing import Any

import torch

from specsim.acceptance.measured_pair import measure_pair
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.files import write_whole
from specsim.core.kv_buffer import KV_DTYPES, KVDtype
from specsim.maintain.page import markdown
from specsim.models.load import load
from specsim.models.shipped import TINY, load_prompts
from specsim.simulator.acceptance_record import AcceptanceRecord

FILE = TINY / "kv_acceptance.json"
CONFIGS = (SpecConfig(1, 3), SpecConfig(4, 4, 16))
NEW_TOKENS = 64
FORMATS = tuple(product(KV_DTYPES, KV_DTYPES))  # of the target's KV and of the drafter's
HEADINGS = ("KV of the target", "KV of the drafter", "chain of 3", "95 % interval", "tree of 16", "95 % interval")


def measured(
    config: SpecConfig, kv_dtype: KVDtype, draft_kv_dtype: KVDtype, count: int | None = None
) -> AcceptanceRecord:
    """Measure one setting at temperature 0 on the first `count` held-out prompts, all by default, in float64."""
    options = EngineOptions(dtype=torch.float64, kv_dtype=kv_dtype, draft_kv_dtype=draft_kv_dtype)
    prompts = [prompt["text"] for prompt in load_prompts()[:count]]
    return measure_pair(load(), prompts, config, SamplingParams(max_new_tokens=NEW_TOKENS), options)


def row_of(config: SpecConfig, formats: tuple[KVDtype, KVDtype]) -> dict[str, Any]:
    """Measure one setting on all prompts, and keep its counts by request."""
    record = measured(config, *formats)
    assert record.interval is not None
    return {
        "topk": config.topk,
        "num_steps": config.num_steps,
        "num_draft_tokens": config.num_draft_tokens,
        "kv_dtype": formats[0],
        "draft_kv_dtype": formats[1],
        "prompts": record.prompts,
        "accept_length": record.accept_length,
        "low": record.interval.low,
        "high": record.interval.high,
        "counts": [[request.rounds, request.accepted_drafts] for request in record.counts],
    }


def table() -> str:
    """Make the table of the kept results, a row for the formats and two cells for each tree."""
    cells: dict[tuple[str, str], list[str]] = {}
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    for row in rows:
        formats = (row["kv_dtype"], row["draft_kv_dtype"])
        cells.setdefault(formats, [*formats])
        cells[formats] += [f"{row['accept_length']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}"]
    prompts = f"{len(rows[0]['counts'])} held-out prompts, {NEW_TOKENS} new tokens each"
    return "\n".join([*markdown(HEADINGS, cells.values()), "", f"Accept lengths at temperature 0 on {prompts}."])


if __name__ == "__main__":
    measured_rows = [row_of(config, formats) for formats in FORMATS for config in CONFIGS]
    write_whole(FILE, ("[\n" + ",\n".join(map(json.dumps, measured_rows)) + "\n]\n").encode(), "kv_acceptance")
    print(table())
