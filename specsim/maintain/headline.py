"""Headline figures of the front page, each with the command that shows it, from kept GPU results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specsim.bench.row import OURS

ROUND = ("EAGLE-3 round", "(4, 3, 8)")  # name and tree of the benchmark row on the front page


def figures(folder: Path) -> str:
    """List of three headline figures; a figure whose result is not kept is left out."""
    return "".join(
        line(json.loads(path.read_text(encoding="utf-8")))
        for name, line in (
            ("diff-full-float32-cuda", _differential),
            ("certify-cuda", _certificates),
            ("bench-round", _round),
        )
        if (path := folder / f"{name}.json").exists()
    )


def _differential(result: Mapping[str, Any]) -> str:
    mismatches = f"{result['mismatches']:,} mismatches" if result["mismatches"] else "no mismatch"
    return (
        f"- **{result['decisions']:,} decisions, {mismatches}**: kernels against the reference in "
        f"{result['num_cells']:,} settings. `specsim diff --grid full`\n"
    )


def _certificates(result: Mapping[str, Any]) -> str:
    lossless = [each["total_variation_float"] for each in result["certificates"] if each["promise"] == "lossless"]
    return (
        f"- **{lossless.count(0)} of {len(lossless)} lossless cases exact**: the verifier's output distribution, in "
        f"fractions, is the target's. `{result['command']}`\n"
    )


def _round(result: Mapping[str, Any]) -> str:
    name, tree = ROUND
    row = next(row for row in result["rows"] if row["name"] == name and row["setting"].get("tree") == tree)
    milliseconds = row["timings"][OURS]["median_us"] / 1e3
    gpu = result["runs"][0]["versions"]["gpu"]
    return (
        f"- **{milliseconds:.2f} ms a round, {row['time_over_bound']:.2f} × the roofline bound**: EAGLE-3 on "
        f"{result['shape']} (bfloat16, one request, one {gpu}). `specsim bench --suite round`\n"
    )
