"""Tables of measurements in CSV: a row for each batch or number of clients and setting."""

import re
from collections.abc import Mapping

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.limits import MOST_RUNNING, MOST_STEPS, MOST_TOKENS, MOST_WIDTH
from specsim.core.table import Row, read_table
from specsim.simulator.calibration.context import Context
from specsim.simulator.calibration.observation import Observation

LOADS = ("batch", "concurrency")
SPEEDS = ("tokens_per_s", "tpot_ms")
COLUMNS = {
    "batch": "requests of an engine's batch; speeds are of decoding alone",
    "concurrency": "clients, each with one request at a time; speeds include prompts",
    "num_steps": "draft steps, 0 or plain for decoding without drafts",
    "topk": "drafts kept at each step, 1 unless given",
    "num_draft_tokens": "nodes that the target verifies, num_steps + 1 unless given",
    "accept_length": "mean tokens of a round, bonus included",
    "tokens_per_s": "output tokens a second of all requests",
    "tpot_ms": "milliseconds per output token of a request",
    "ttft_ms": "milliseconds to the first token, with concurrency",
    "prompt_tokens": "mean tokens of a prompt",
    "output_tokens": "mean tokens of an output",
}
_ALIASES = {
    "batch_size": "batch",
    "bs": "batch",
    "clients": "concurrency",
    "steps": "num_steps",
    "setting": "num_steps",
    "num_draft": "num_draft_tokens",
    "acc_length": "accept_length",
    "throughput": "tokens_per_s",
    "output_throughput": "tokens_per_s",
    "tok/s": "tokens_per_s",
    "tpot": "tpot_ms",
}
_INTEGERS = {  # columns of integers with their least and most
    "batch": (1, MOST_RUNNING),
    "concurrency": (1, MOST_RUNNING),
    "num_steps": (0, MOST_STEPS),
    "topk": (1, MOST_WIDTH),
    "num_draft_tokens": (1, MOST_WIDTH),
    "prompt_tokens": (1, MOST_TOKENS),
    "output_tokens": (1, MOST_TOKENS),
}
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")  # thousands with commas between them


def read_csv(text: str, place: str, context: Context) -> list[Observation]:
    """Read the rows of a table; InputError names `place` and the row."""
    table = read_table(text, "file", place, lambda name: _ALIASES.get(name.strip().lower(), name.strip().lower()))
    allowed = f"a CSV file with columns of {', '.join(COLUMNS)}"
    for names, missing in ((LOADS, "batch or concurrency is"), (SPEEDS, "tokens_per_s and tpot_ms are")):
        require(any(name in table.columns for name in names), "file", place, f"{allowed} ({missing} missing)")
    found = [_row(row, context) for row in table.rows]
    require(found, "file", place, "at least one row of figures")
    return found


def _row(row: Row, context: Context) -> Observation:
    place = row.place
    used = {name: text for name, text in row.fields.items() if name in COLUMNS and text.strip()}
    row = Row(place, {name: _decimal(name, text) for name, text in used.items()})
    integers = {name: row.integer(name, *limits) for name, limits in _INTEGERS.items() if name in row.fields}
    number = {name: row.number(name) for name in row.fields if name not in _INTEGERS}
    steps = integers.get("num_steps")
    setting = context.with_setting(steps, integers.get("topk"), integers.get("num_draft_tokens")).config(place)
    is_batch = "batch" in integers
    size = integers.get("batch", integers.get("concurrency"))
    if size is None:
        raise InputError("batch", "empty", f"a number, or a number of concurrency (in {place})")
    length = 1.0 if setting.is_plain else number.get("accept_length")
    return Observation(
        f"{named(setting)}, {'batch' if is_batch else 'clients'} {size}",
        setting,
        size,
        length,
        integers.get("prompt_tokens") or context.number("prompt_tokens", place),
        integers.get("output_tokens") or context.number("output_tokens", place),
        _figures(number, size, is_batch, place),
    )


def _figures(number: Mapping[str, float], size: int, is_batch: bool, place: str) -> dict[str, float]:
    speed = number.get("tokens_per_s")
    tpot = number.get("tpot_ms")
    if speed is None and tpot is None:
        raise InputError("tokens_per_s", "empty", f"a number, or a number of tpot_ms (in {place})")
    if is_batch:
        return {"decode_tokens_per_s": speed if speed is not None else size * 1e3 / (tpot or 1.0)}
    found = {"tokens_per_s": speed, "tpot_s": tpot and tpot * 1e-3, "ttft_s": number.get("ttft_ms", 0) * 1e-3}
    return {name: value for name, value in found.items() if value}


def named(setting: SpecConfig) -> str:
    """Name a setting in a few words."""
    if setting.is_plain:
        return "plain"
    tree = f", topk {setting.topk}, {setting.num_draft_tokens} nodes" if setting.topk > 1 else ""
    return f"{setting.num_steps} steps{tree}"


def _decimal(name: str, text: str) -> str:
    """Write a field as a number: 0 steps without drafts, no thousands' commas, no sign of a factor.

    A comma counts as one of thousands where figures are that large; in milliseconds it may be a decimal comma.
    """
    text = text.strip().rstrip("x×")
    if name == "num_steps" and text.lower() in ("plain", "none", "off"):
        return "0"
    is_large = name == "tokens_per_s" or name in _INTEGERS
    return text.replace(",", "") if is_large and _GROUPED.fullmatch(text) else text
