"""What a serving run did, step by step, and the same as data frames, as JSON and as a Parquet file."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args, get_origin, get_type_hints

from specsim.core.errors import InputError
from specsim.core.files import write_whole

if TYPE_CHECKING:
    import pandas

# A record's tuples, and what one of their entries is called among the events.
EVENTS = {
    "arrived": "arrive",
    "rejected": "reject",
    "aborted": "abort",
    "preempted": "preempt",
    "admitted": "admit",
    "resumed": "resume",
    "reused": "reuse",
    "prefilled": "prefill",
    "decoded": "decode",
    "results": "result",
    "finished": "finish",
}
# The columns of the events with their types; those after `event` are empty where an event has no such value.
EVENT_COLUMNS = {
    "step": "int64",
    "seconds": "float64",
    "request_id": "int64",
    "event": "string",
    "seq_len": "Int64",
    "in_page": "boolean",
    "is_prefilling": "boolean",
    "num_reused": "Int64",
    "start": "Int64",
    "end": "Int64",
    "launched": "Int64",
    "num_accepted_tokens": "Int64",
    "num_kept": "Int64",
    "acceptance": "string",
    "finish_reason": "string",
}
COUNTS = (*EVENTS, "num_reused", "num_prefilled", "num_accepted_tokens", "num_kept", "evicted_pages")
SLOTS = ("free_slots", "reserved_slots", "committed_slots", "cached_slots", "withheld_slots")
_ENTRIES = {"reused": ("request_id", "num_reused"), "finished": ("request_id", "finish_reason")}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Columns start to end - 1 of a request that one prefill call filled."""

    request_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Result:
    """A round that was read in this step.

    launched: the step in which it ran. num_accepted_tokens: of the whole round, bonus included. num_kept: how many of
    them the request took; fewer where it ended inside the round, 0 where it had ended before.
    """

    request_id: int
    launched: int
    num_accepted_tokens: int
    num_kept: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """An admitted request that gave its slots back and waits again.

    seq_len: its committed columns; in_page: they end inside a page; is_prefilling: its prefill was not complete.
    """

    request_id: int
    seq_len: int
    in_page: bool
    is_prefilling: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the scheduler.

    seconds: since the scheduler was made, at the end of the step. arrived, admitted, resumed (a subset of admitted),
    decoded, aborted, rejected: request ids. reused: (request id, columns that admission found filled). finished:
    (request id, finish reason). evicted_pages: that the prefix tree gave up. The rest counts slots at the end of the
    step.
    """

    step: int
    seconds: float
    arrived: tuple[int, ...]
    admitted: tuple[int, ...]
    resumed: tuple[int, ...]
    decoded: tuple[int, ...]
    aborted: tuple[int, ...]
    rejected: tuple[int, ...]
    prefilled: tuple[Chunk, ...]
    reused: tuple[tuple[int, int], ...]
    results: tuple[Result, ...]
    finished: tuple[tuple[int, str], ...]
    preempted: tuple[Preemption, ...]
    evicted_pages: int
    free_slots: int
    reserved_slots: int
    committed_slots: int
    cached_slots: int
    withheld_slots: int


class StepLog:
    """A record while its step is under way: events by name, in the order in which they happen."""

    def __init__(self, step: int):
        self.step = step
        self.events: dict[str, list] = {name: [] for name in EVENTS}

    def record(self, seconds: float, evicted_pages: int, usage: dict[str, int]) -> StepRecord:
        """What happened, with the slots of KVPool.usage at the end."""
        slots = {name: usage[name.removesuffix("_slots")] for name in SLOTS}
        events = {name: tuple(events) for name, events in self.events.items()}
        return StepRecord(step=self.step, seconds=seconds, evicted_pages=evicted_pages, **slots, **events)


@dataclass(slots=True)
class Trace:
    """The records of a run, in the order of its steps.

    acceptance: what decided how many drafts were accepted: `target`, or a schedule, named (core.synthetic_acceptance).
    """

    records: list[StepRecord] = field(default_factory=list)
    acceptance: str = "target"

    def append(self, record: StepRecord) -> None:
        self.records.append(record)

    def __len__(self) -> int:
        return len(self.records)

    def counts(self) -> dict[str, int]:
        """Totals over the run: its steps, how often each event came (`admitted` includes `resumed`), num_reused and
        num_prefilled columns, num_accepted_tokens and num_kept of the results, evicted_pages.
        """
        rows = [_counts(record) for record in self.records]
        return {"steps": len(self)} | {name: sum(row[name] for row in rows) for name in COUNTS}

    def steps(self) -> "pandas.DataFrame":
        """A row a step: step, seconds, what counts() adds up, and the slots at the end of the step."""
        rows = [
            {name: getattr(record, name) for name in ("step", "seconds", *SLOTS)} | _counts(record)
            for record in self.records
        ]
        return _frame(rows, {"step": "int64", "seconds": "float64"} | dict.fromkeys((*COUNTS, *SLOTS), "int64"))

    def events(self) -> "pandas.DataFrame":
        """A row an event, with the columns EVENT_COLUMNS; within a step in the order of EVENTS.

        A resumed request has the event `admit` as well.
        """
        rows = [row for record in self.records for row in _events(record)]
        return _frame([row | self._decided(row) for row in rows], EVENT_COLUMNS)

    def _decided(self, row: dict) -> dict:
        return {"acceptance": self.acceptance} if row["event"] == EVENTS["results"] else {}

    def to_json(self) -> dict:
        """A value that json can write and from_json takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The trace of which to_json made this value; raises InputError for one that it cannot have made."""
        return _read(cls, value, "trace")

    def to_parquet(self) -> bytes:
        """Encode the events as a Parquet file."""
        frame = self.events()
        try:
            return frame.to_parquet(engine="pyarrow", index=False)
        except ImportError as error:
            raise _missing("a Parquet file", error) from error

    def write_parquet(self, path: Path | str) -> None:
        """Write the events, whole or not at all."""
        data = self.to_parquet()
        path = Path(path)
        try:
            write_whole(path, data)
        except OSError as error:
            raise InputError("trace", str(path), f"a file that can be written ({error.strerror})") from error


def _counts(record: StepRecord) -> dict[str, int]:
    return {name: len(getattr(record, name)) for name in EVENTS} | {
        "num_reused": sum(columns for _, columns in record.reused),
        "num_prefilled": sum(chunk.end - chunk.start for chunk in record.prefilled),
        "num_accepted_tokens": sum(result.num_accepted_tokens for result in record.results),
        "num_kept": sum(result.num_kept for result in record.results),
        "evicted_pages": record.evicted_pages,
    }


def _events(record: StepRecord) -> Iterator[dict]:
    for name, event in EVENTS.items():
        for entry in getattr(record, name):
            values = asdict(entry) if is_dataclass(entry) else _named(name, entry)
            yield {"step": record.step, "seconds": record.seconds, "event": event, **values}


def _named(name: str, entry: int | tuple) -> dict:
    return {"request_id": entry} if isinstance(entry, int) else dict(zip(_ENTRIES[name], entry, strict=True))


def _frame(rows: list[dict], types: dict[str, str]) -> "pandas.DataFrame":
    """Made column by column, so that no integer passes through a float on its way to a column with gaps."""
    try:
        import pandas
    except ImportError as error:
        raise _missing("a data frame", error) from error
    return pandas.DataFrame(
        {name: pandas.array([row.get(name) for row in rows], dtype=dtype) for name, dtype in types.items()}
    )


def _missing(made: str, error: ImportError) -> InputError:
    allowed = f"JSON only, unless pandas and pyarrow are installed by: pip install 'specsim[data]' ({error})"
    return InputError("trace", made, allowed)


def _read(kind: Any, value: Any, name: str) -> Any:
    """A value of this type from what JSON made of it, which is called `name`."""
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != kinds.keys():
            raise _unreadable(name, value, f"an object with the fields {', '.join(kinds)}")
        return kind(**{field: _read(kinds[field], value[field], f"{name}.{field}") for field in kinds})
    if get_origin(kind) in (list, tuple):
        kinds = get_args(kind)
        fixed = get_origin(kind) is tuple and kinds[-1] is not Ellipsis
        if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(kinds)):
            raise _unreadable(name, value, f"an array of {len(kinds)} values" if fixed else "an array")
        kinds = kinds if fixed else kinds[:1] * len(value)
        pairs = enumerate(zip(kinds, value, strict=True))
        return get_origin(kind)(_read(each, item, f"{name}[{index}]") for index, (each, item) in pairs)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _unreadable(name, value, {int: "an integer", float: "a number", bool: "true or false"}.get(kind, "text"))
    return value


def _unreadable(name: str, value: Any, allowed: str) -> InputError:
    shown = value if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    return InputError(name, shown, allowed)
