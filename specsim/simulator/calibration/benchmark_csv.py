"""Tables of measurements in CSV: a row for each batch or number of clients and setting."""

import csv
from collections.abc import Mapping
from io import StringIO

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require
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


def read_csv(text: str, place: str, context: Context) -> list[Observation]:
    """Read the rows of a table; InputError names `place` and the row."""
    reader = csv.DictReader(StringIO(text))
    headings = [_ALIASES.get(name.strip().lower(), name.strip().lower()) for name in reader.fieldnames or ()]
    allowed = f"a CSV file with columns of {', '.join(COLUMNS)}"
    require(any(name in headings for name in LOADS), "file", place, f"{allowed} (batch or concurrency is missing)")
    require(
        any(name in headings for name in SPEEDS), "file", place, f"{allowed} (tokens_per_s and tpot_ms are missing)"
    )
    reader.fieldnames = headings
    found = [_row(row, f"{place}, row {number}", context) for number, row in enumerate(reader, start=1)]
    require(found, "file", place, "at least one row of figures")
    return found


def _row(row: Mapping[str, str], place: str, context: Context) -> Observation:
    values = {name: text.strip() for name, text in row.items() if name in COLUMNS and text and text.strip()}
    number = {name: _number(name, text, place) for name, text in values.items() if name != "num_steps"}
    text = values.get("num_steps", "")
    is_plain = text.lower() in ("plain", "none", "off")
    steps = 0 if is_plain else int(_number("num_steps", text, place)) if text else None
    whole = {name: int(number[name]) if name in number else None for name in (*LOADS, "topk", "num_draft_tokens")}
    setting = context.with_setting(steps, whole["topk"], whole["num_draft_tokens"]).config(place)
    is_batch = whole["batch"] is not None
    size = whole["batch"] if is_batch else whole["concurrency"]
    if size is None:
        raise InputError("batch", "empty", f"a number, or a number of concurrency (in {place})")
    length = 1.0 if setting.is_plain else number.get("accept_length")
    return Observation(
        f"{named(setting)}, {'batch' if is_batch else 'clients'} {size}",
        setting,
        size,
        length,
        int(number.get("prompt_tokens") or context.number("prompt_tokens", place)),
        int(number.get("output_tokens") or context.number("output_tokens", place)),
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


def _number(name: str, text: str, place: str) -> float:
    try:
        value = float(text.replace(",", "").rstrip("x×"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InputError(name, text, f"a number of at least 0 (in {place})")
    return value
