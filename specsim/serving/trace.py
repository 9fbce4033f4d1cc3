"""Trace of a serving run, step by step, as data frames, JSON or a Parquet file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from specsim.core.errors import InputError
from specsim.core.files import write_whole
from specsim.core.json_schema import read_dataclass

if TYPE_CHECKING:
    import pandas


def data_frame(columns: Mapping[str, Sequence[Any]], types: Mapping[str, str]) -> "pandas.DataFrame":
    """Make a frame column by column, so that integers in a column with gaps never become floats.

    types: pandas dtypes by column name; the others are inferred. Raises InputError without pandas.
    """
    try:
        import pandas
    except ImportError as error:
        raise needs_pandas("a data frame", error) from error
    return pandas.DataFrame(
        {name: pandas.array(list(values), dtype=types.get(name)) for name, values in columns.items()}
    )


def needs_pandas(output: str, error: ImportError) -> InputError:
    """Say how to install what a table needs."""
    return InputError("table", output, f"JSON, unless pandas is installed by: pip install 'specsim[data]' ({error})")


# Fields of a record that hold events, and the name of one such event.
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
# Columns of the event frame and their types; those after `event` are empty where an event has no such value.
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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Columns start to end - 1 of a request, filled by one prefill call."""

    request_id: int  # id of the request
    start: int  # first position of the chunk
    end: int  # position after it


@dataclass(frozen=True, slots=True)
class DeliveredRound:
    """A round whose result was read in this step."""

    request_id: int  # id of the request
    launched: int  # step in which it ran
    num_accepted_tokens: int  # tokens that the round accepted, bonus token included
    num_kept: int  # fewer where the request ended inside the round, 0 where it had ended before


@dataclass(frozen=True, slots=True)
class Preemption:
    """A preemption: an admitted request whose slots were freed and that waits again."""

    request_id: int  # id of the request
    seq_len: int  # committed columns
    in_page: bool  # whether they end inside a page
    is_prefilling: bool  # whether its prefill was not complete


class Reuse(NamedTuple):
    """Columns of a request that admission found filled, an array in JSON."""

    request_id: int
    num_reused: int


class FinishEvent(NamedTuple):
    """The end of a request, an array in JSON."""

    request_id: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the scheduler: events of requests, most of them by id, and slots at its end."""

    step: int  # number of the step
    seconds: float  # seconds from the start of the scheduler to the end of the step
    arrived: tuple[int, ...]  # ids of requests that arrive in this step
    admitted: tuple[int, ...]  # ids of requests that are admitted in this step
    resumed: tuple[int, ...]  # admitted requests that were preempted before
    decoded: tuple[int, ...]  # ids of requests that run a round in this step
    aborted: tuple[int, ...]  # ids of requests that are aborted in this step
    rejected: tuple[int, ...]  # ids of requests that are rejected in this step
    prefilled: tuple[Chunk, ...]  # chunks of prompts that are prefilled
    reused: tuple[Reuse, ...]  # prompt tokens found in the prefix cache
    results: tuple[DeliveredRound, ...]  # rounds whose results are read
    finished: tuple[FinishEvent, ...]  # requests that end
    preempted: tuple[Preemption, ...]  # requests that are preempted
    evicted_pages: int  # KV pages that the prefix cache evicts
    free_slots: int  # KV slots that are free, withheld ones included, at the end of the step
    reserved_slots: int  # KV slots that are held, but not committed, at the end of the step
    committed_slots: int  # KV slots with committed tokens, at the end of the step
    cached_slots: int  # KV slots that are committed and kept for the prefix cache, at the end of the step
    withheld_slots: int  # KV slots beyond the limit of the pool, at the end of the step
    setting: int = 0  # number of the round's setting, of an engine that switches


@dataclass(slots=True)
class Trace:
    """The records of a run, in the order of its steps."""

    records: list[StepRecord] = field(default_factory=list)  # steps in their order
    acceptance: str = "target"  # or the name of a schedule (core.synthetic_acceptance)

    def __len__(self) -> int:
        return len(self.records)

    def counts(self) -> dict[str, int]:
        """Sum up the run's steps, its events (`admitted` includes `resumed`) and the other counts in COUNTS."""
        rows = [_counts(record) for record in self.records]
        return {"steps": len(self)} | {name: sum(row[name] for row in rows) for name in COUNTS}

    def steps(self) -> "pandas.DataFrame":
        """Make a frame with one row for each step.

        Its columns are step, seconds, the summands of counts(), and the slots at the step's end.
        """
        rows = [
            {name: getattr(record, name) for name in ("step", "seconds", *SLOTS)} | _counts(record)
            for record in self.records
        ]
        return _frame(rows, {"step": "int64", "seconds": "float64"} | dict.fromkeys((*COUNTS, *SLOTS), "int64"))

    def events(self) -> "pandas.DataFrame":
        """Make a frame with one row for each event and the columns EVENT_COLUMNS.

        Events of a step are in the order of EVENTS. A resumed request has the event `admit` as well.
        """
        rows = [row for record in self.records for row in _events(record)]
        for row in rows:
            if row["event"] == EVENTS["results"]:
                row["acceptance"] = self.acceptance
        return _frame(rows, EVENT_COLUMNS)

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON value, which from_json reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read a value of to_json, or raise InputError."""
        return read_dataclass(cls, value, "trace")

    def to_parquet(self) -> bytes:
        """Encode the events as a Parquet file."""
        frame = self.events()
        try:
            return frame.to_parquet(engine="pyarrow", index=False)
        except ImportError as error:
            raise needs_pandas("a Parquet file", error) from error

    def write_parquet(self, path: Path | str) -> None:
        """Write the events to a Parquet file, completely or not at all."""
        write_whole(Path(path), self.to_parquet(), "trace")


def _counts(record: StepRecord) -> dict[str, int]:
    return {name: len(getattr(record, name)) for name in EVENTS} | {
        "num_reused": sum(columns for _, columns in record.reused),
        "num_prefilled": sum(chunk.end - chunk.start for chunk in record.prefilled),
        "num_accepted_tokens": sum(result.num_accepted_tokens for result in record.results),
        "num_kept": sum(result.num_kept for result in record.results),
        "evicted_pages": record.evicted_pages,
    }


def _events(record: StepRecord) -> Iterator[dict[str, Any]]:
    for name, event in EVENTS.items():
        for entry in getattr(record, name):
            yield {"step": record.step, "seconds": record.seconds, "event": event, **_values(entry)}


def _values(entry: int | Reuse | FinishEvent | Chunk | DeliveredRound | Preemption) -> dict[str, Any]:
    if isinstance(entry, int):
        return {"request_id": entry}
    return entry._asdict() if isinstance(entry, tuple) else asdict(entry)


def _frame(rows: list[dict[str, Any]], types: dict[str, str]) -> "pandas.DataFrame":
    return data_frame({name: [row.get(name) for row in rows] for name in types}, types)
