import json
import os
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.core.errors import InputError
from specsim.serving.trace import (
    COUNTS,
    EVENT_COLUMNS,
    EVENTS,
    SLOTS,
    Chunk,
    DeliveredRound,
    FinishEvent,
    Preemption,
    Reuse,
    StepRecord,
    Trace,
)

# Request 7 is preempted inside a page and resumed; request 8 arrives, is prefilled in two chunks and stops inside a
# round; request 9 is too long; request 6 is aborted.
IDLE = StepRecord(
    step=0, seconds=0.0, arrived=(), admitted=(), resumed=(), decoded=(), aborted=(), rejected=(), prefilled=(),
    reused=(), results=(), finished=(), preempted=(), evicted_pages=0, free_slots=64, reserved_slots=0,
    committed_slots=0, cached_slots=0, withheld_slots=0,
)  # fmt: skip
RECORDS = [
    replace(
        IDLE, step=4, seconds=0.1, arrived=(8, 9), rejected=(9,), aborted=(6,), admitted=(8,), reused=(Reuse(8, 16),),
        prefilled=(Chunk(8, 16, 21),), preempted=(Preemption(7, 13, in_page=True, is_prefilling=False),),
        finished=(FinishEvent(9, "rejected"), FinishEvent(6, "abort")), evicted_pages=2,
    ),
    replace(
        IDLE, step=5, seconds=1 / 3, admitted=(7,), resumed=(7,), prefilled=(Chunk(8, 21, 24), Chunk(7, 0, 13)),
        decoded=(7, 8), results=(DeliveredRound(7, 5, 4, 4), DeliveredRound(8, 5, 3, 2)),
        finished=(FinishEvent(8, "stop"),),
        free_slots=16, reserved_slots=40, committed_slots=20, cached_slots=8, withheld_slots=4,
    ),
]  # fmt: skip


def run() -> Trace:
    trace = Trace()
    for record in RECORDS:
        trace.records.append(record)
    return trace


def read_parquet(path):
    import pandas

    return pandas.read_parquet(path)


def test_counts_by_hand():
    assert len(run()) == 2
    assert run().counts() == {
        "steps": 2, "arrived": 2, "rejected": 1, "aborted": 1, "preempted": 1, "admitted": 2, "resumed": 1, "reused": 1,
        "prefilled": 3, "decoded": 2, "results": 2, "finished": 3, "num_reused": 16, "num_prefilled": 5 + 3 + 13,
        "num_accepted_tokens": 7, "num_kept": 6, "evicted_pages": 2,
    }  # fmt: skip


def test_steps_by_hand():
    steps = run().steps()
    assert list(steps.columns) == ["step", "seconds", *COUNTS, *SLOTS]
    assert steps.step.tolist() == [4, 5]
    assert steps.seconds.tolist() == [0.1, 1 / 3]
    assert steps.num_prefilled.tolist() == [5, 16]
    assert steps.decoded.tolist() == [0, 2]
    assert steps.loc[1, list(SLOTS)].tolist() == [16, 40, 20, 8, 4]
    assert {str(dtype) for name, dtype in steps.dtypes.items() if name != "seconds"} == {"int64"}


def test_events_by_hand():
    events = run().events()
    assert events.dtypes.map(str).to_dict() == EVENT_COLUMNS
    assert [name for name, kind in EVENT_COLUMNS.items() if kind == "float64"] == ["seconds"]
    rows = [{k: v for k, v in row.items() if v is not None} for row in json.loads(events.to_json(orient="records"))]
    told = {"acceptance": "target"}
    first, second = {"step": 4, "seconds": 0.1}, {"step": 5, "seconds": pytest.approx(1 / 3)}
    assert rows == [
        first | {"request_id": 8, "event": "arrive"},
        first | {"request_id": 9, "event": "arrive"},
        first | {"request_id": 9, "event": "reject"},
        first | {"request_id": 6, "event": "abort"},
        first | {"request_id": 7, "event": "preempt", "seq_len": 13, "in_page": True, "is_prefilling": False},
        first | {"request_id": 8, "event": "admit"},
        first | {"request_id": 8, "event": "reuse", "num_reused": 16},
        first | {"request_id": 8, "event": "prefill", "start": 16, "end": 21},
        first | {"request_id": 9, "event": "finish", "finish_reason": "rejected"},
        first | {"request_id": 6, "event": "finish", "finish_reason": "abort"},
        second | {"request_id": 7, "event": "admit"},
        second | {"request_id": 7, "event": "resume"},
        second | {"request_id": 8, "event": "prefill", "start": 21, "end": 24},
        second | {"request_id": 7, "event": "prefill", "start": 0, "end": 13},
        second | {"request_id": 7, "event": "decode"},
        second | {"request_id": 8, "event": "decode"},
        second | {"request_id": 7, "event": "result", "launched": 5, "num_accepted_tokens": 4, "num_kept": 4} | told,
        second | {"request_id": 8, "event": "result", "launched": 5, "num_accepted_tokens": 3, "num_kept": 2} | told,
        second | {"request_id": 8, "event": "finish", "finish_reason": "stop"},
    ]


def test_a_trace_without_steps_has_the_same_columns():
    assert Trace().counts() == dict.fromkeys(("steps", *COUNTS), 0)
    for empty, full in ((Trace().steps(), run().steps()), (Trace().events(), run().events())):
        assert len(empty) == 0
        assert empty.dtypes.to_dict() == full.dtypes.to_dict()


def test_every_tuple_of_a_record_has_its_event():
    assert set(EVENTS) == {each.name for each in fields(StepRecord) if isinstance(getattr(IDLE, each.name), tuple)}


IDS = st.integers(0, 2**32 - 1)
SOME = st.integers(0, 2**53 + 1)
RECORD = st.builds(
    StepRecord,
    step=SOME,
    seconds=st.floats(0, 1e9),
    **{
        name: st.lists(of, max_size=3).map(tuple)
        for name, of in {
            **dict.fromkeys(("arrived", "admitted", "resumed", "decoded", "aborted", "rejected"), IDS),
            "prefilled": st.builds(Chunk, IDS, SOME, SOME),
            "reused": st.builds(Reuse, IDS, SOME),
            "results": st.builds(DeliveredRound, IDS, SOME, SOME, SOME),
            "finished": st.builds(FinishEvent, IDS, st.sampled_from(["stop", "length", "abort", "rejected", "é"])),
            "preempted": st.builds(Preemption, IDS, SOME, st.booleans(), st.booleans()),
        }.items()
    },
    **dict.fromkeys(("evicted_pages", *SLOTS), SOME),
)
TRACES = st.lists(RECORD, max_size=3).map(Trace)


@given(TRACES)
def test_json_gives_the_same_trace_back(trace):
    assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace
    assert Trace.from_json(trace.to_json()) == trace


@given(TRACES)
def test_counts_agree_with_the_frames(trace):
    counts, steps, events = trace.counts(), trace.steps(), trace.events()
    assert counts["steps"] == len(steps) == len(trace)
    assert {name: counts[name] for name in COUNTS} == {name: int(steps[name].sum()) for name in COUNTS}
    assert {event: counts[name] for name, event in EVENTS.items()} == {
        event: int((events.event == event).sum()) for event in EVENTS.values()
    }
    assert counts["num_prefilled"] == int((events.end - events.start).sum())
    for name in ("num_reused", "num_accepted_tokens", "num_kept"):
        assert counts[name] == int(events[name].sum())
    for name in SLOTS:
        assert steps[name].tolist() == [getattr(record, name) for record in trace.records]


@given(TRACES)
def test_events_hold_every_value_exactly(trace):
    """Values include integers that no float holds, in columns with gaps."""
    events = trace.events()
    assert events.seq_len.dropna().tolist() == [each.seq_len for record in trace.records for each in record.preempted]
    assert events.launched.dropna().tolist() == [each.launched for record in trace.records for each in record.results]
    reasons = [reason for record in trace.records for _, reason in record.finished]
    assert events.finish_reason.dropna().tolist() == reasons


def changed(**changes) -> dict:
    value = json.loads(json.dumps(run().to_json()))
    value["records"][1] |= changes
    return value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ([], "trace"),
        (None, "trace"),
        ({"records": {}, "acceptance": "target"}, "trace.records"),
        ({"records": [3], "acceptance": "target"}, "trace.records[0]"),
        (changed(extra=1), "trace.records[1]"),
        (changed(step=1.0), "trace.records[1].step"),
        (changed(step=True), "trace.records[1].step"),
        (changed(seconds="1"), "trace.records[1].seconds"),
        (changed(seconds=True), "trace.records[1].seconds"),
        (changed(seconds=None), "trace.records[1].seconds"),
        (changed(arrived="12"), "trace.records[1].arrived"),
        (changed(arrived=[1, [2]]), "trace.records[1].arrived[1]"),
        (changed(finished=[[1]]), "trace.records[1].finished[0]"),
        (changed(finished=[[1, 2]]), "trace.records[1].finished[0][1]"),
        (changed(prefilled=[{"request_id": 1, "start": 0}]), "trace.records[1].prefilled[0]"),
        (
            changed(preempted=[{"request_id": 1, "seq_len": 0, "in_page": 1, "is_prefilling": False}]),
            "trace.records[1].preempted[0].in_page",
        ),
    ],
)
def test_from_json_names_the_path_of_a_bad_value(value, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        Trace.from_json(value)


def test_from_json_takes_a_whole_number_of_seconds():
    seconds = Trace.from_json(changed(seconds=2)).records[1].seconds
    assert (type(seconds), seconds) == (float, 2.0)


@pytest.mark.parametrize("trace", [run(), Trace()], ids=["run", "empty"])
def test_parquet_holds_the_events(trace, tmp_path):
    path = tmp_path / "events.parquet"
    path.write_text("what stood here before")
    trace.write_parquet(path)
    assert os.listdir(tmp_path) == ["events.parquet"]
    assert read_parquet(path).dtypes.to_dict() == trace.events().dtypes.to_dict()
    assert read_parquet(path).equals(trace.events())


def test_parquet_follows_a_link(tmp_path):
    path, link = tmp_path / "events.parquet", tmp_path / "link"
    link.symlink_to(path)
    run().write_parquet(str(link))
    assert link.is_symlink()
    assert len(read_parquet(path)) == len(run().events())


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_an_unfinished_parquet_keeps_the_old_file(failing, tmp_path, monkeypatch):
    path = tmp_path / "events.parquet"
    path.write_text("before")

    def full(where, *_):
        raise OSError(28, "No space left on device", str(where))

    monkeypatch.setattr("pathlib.Path.write_bytes" if failing == "write_bytes" else "os.replace", full)
    with pytest.raises(InputError, check=lambda error: error.name == "trace"):
        run().write_parquet(path)
    assert os.listdir(tmp_path) == ["events.parquet"]
    assert path.read_text() == "before"


def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, *(tmp_path / name for name in ("missing/events.parquet", "file/below", "a" * 300))):
        with pytest.raises(InputError, check=lambda error: error.name == "trace" and "\n" not in str(error)):
            run().write_parquet(path)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("library", "make"),
    [
        ("pandas", Trace.steps),
        ("pandas", Trace.events),
        ("pandas", lambda trace: trace.write_parquet("x.parquet")),
        ("pyarrow", lambda trace: trace.write_parquet("x.parquet")),
    ],
)
def test_frames_without_a_library_name_the_extra(library, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=r"pip install 'specsim\[data\]'"):
        make(run())
    assert os.listdir(tmp_path) == []
    assert Trace.from_json(run().to_json()) == run()
