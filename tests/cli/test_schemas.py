"""JSON outputs name their schemas and follow them; specsim schema prints these.

Every output that any test writes is validated (tests/conftest.py). Here each command runs at least once.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator

import specsim.acceptance.prediction
import specsim.bench.clock
import specsim.bench.session
from specsim import SpecConfig
from specsim.bench.roofline import Peaks, RooflineBound, TensorBytes
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing
from specsim.bench.suites import Suite
from specsim.cli.schema import DIALECT, comments, document, type_schema
from specsim.core.json_schema import VERSIONS, schema_name
from specsim.simulator.calibration import published

pytestmark = pytest.mark.usefixtures("shipped")
ROOT = Path(__file__).parents[2]
LOAD = "--requests 4 --prompt-tokens 20 --output-tokens 4"
RUNS = {
    "accept": "accept --prompts 1 --max-new-tokens 4",
    "acceptance": "accept --target tiny --drafter eagle3 --prompts 2 --max-new-tokens 4",
    "bench": "bench --suite kernels",
    "calibrate": "calibrate {table} --prompt-tokens 9 --output-tokens 9",
    "calibrate-published": "calibrate --published",
    "certify": "certify --verifier greedy",
    "conformance": "conformance --module specsim.correctness.conformance.fast_adapter --ops shift_ids --device cpu",
    "diff": "diff --topk 1 --num-steps 1 --batch 1 --impl reference",
    "explain": "explain --a {a} --b {a}",
    "faults": "faults --name empty-batch-keeps-verify-state --jobs 1",
    "generate": "generate --max-new-tokens 3",
    "lint-report": "lint-report {report}",
    "parity": "parity --engine {tensors}",
    "plan": f"plan {LOAD} --replicates 1 --policies",
    "predict": "predict --prompts 1 --max-new-tokens 4",
    "predict-record": "predict --acceptance {shares}",
    "run": "run --requests {requests}",
    "run-compare": "run --requests {requests} --compare",
    "sampling-test": "sampling-test --verifier gumbel --tokens 1000",
    "simulate": f"simulate {LOAD}",
    "simulate-table": "simulate --table leviathan_table1",
    "soak": "soak --requests 2 --jobs 1",
    "sweep": f"sweep --out {{folder}}/cells.sqlite --vary num_steps=0,1,99 {LOAD} --jobs 1",
}


@pytest.fixture
def files(tmp_path, call) -> dict[str, str]:
    """Inputs of the runs."""
    requests = [{"prompt": "def f", "max_new_tokens": 3}, {"prompt": "import", "max_new_tokens": 2}]
    (tmp_path / "requests.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in requests))
    (tmp_path / "report.csv").write_text("metric,value\nMedian ITL (ms),5\nP99 ITL (ms),4\n")
    (tmp_path / "table.csv").write_text("batch,num_steps,accept_length,tokens_per_s\n1,3,2,200\n8,3,2,1500\n")
    (tmp_path / "a.json").write_text(json.dumps({"outputs": [{"token_ids": [5], "logprobs": [-0.5]}]}))
    (tmp_path / "shares.json").write_text(json.dumps({"shares": [[0.7, 0.1], [0.6, 0.1]]}))
    assert call("parity", "--dump", str(tmp_path / "tensors.safetensors"))[0] == 0
    return {
        "shares": str(tmp_path / "shares.json"),
        "folder": str(tmp_path),
        "requests": str(tmp_path / "requests.jsonl"),
        "report": str(tmp_path / "report.csv"),
        "table": str(tmp_path / "table.csv"),
        "a": str(tmp_path / "a.json"),
        "tensors": str(tmp_path / "tensors.safetensors"),
    }


@pytest.fixture
def few(monkeypatch):
    """A suite that needs no GPU, and predictions of one setting."""
    peaks = Peaks(1e12, 1e12, 1e12)
    passed = Check("numbers", 0.0, 0)
    bound = RooflineBound((TensorBytes("weight", 4),), 1)
    timing = {OURS: Timing(5.0, 1.0, 9)}
    targets = (PerformanceTarget("time / roofline bound", 1.25, 1.3),)
    rows = (
        BenchRow("op", {"rows": 8}, {OURS: passed}, timing, bound, 4.0, targets, ("a note",)),
        BenchRow("other", {}, {}),
    )
    suites = {"kernels": Suite({"some": lambda *_: iter(rows)}, 60)}
    monkeypatch.setattr("specsim.bench.session.SUITES", suites)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    versions = {"python": "3", "specsim": "1", "torch": "2", "gpu": "a GPU", "code": {"specsim.fast.tree": "0"}}
    monkeypatch.setattr(specsim.bench.session, "versions", lambda device, only_imported: versions)
    monkeypatch.setattr(specsim.bench.clock, "measure_peaks", lambda: peaks)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)


def test_the_runs_are_those_of_all_outputs():
    elsewhere = {"exploration", "profile", "probe"}  # data of --html, calibrate --out and probe have tests of their own
    assert {*RUNS, *elsewhere} == set(VERSIONS)


@pytest.mark.parametrize("output", RUNS)
def test_an_output_follows_its_schema(call, files, request, monkeypatch, tmp_path, output):
    if output == "bench":
        request.getfixturevalue("few")
    if output == "predict":
        config = SpecConfig(1, 1, 2)
        run = partial(specsim.acceptance.prediction.predict, settings=[config], recorded=config)
        monkeypatch.setattr("specsim.acceptance.prediction.predict", run)
    if output == "calibrate-published":  # all tables have tests of their own
        few_tables = published.tables()[4:6]
        monkeypatch.setattr("specsim.simulator.calibration.published_report.tables", lambda: few_tables)
    file = tmp_path / "out.json"
    status, _, err = call(*RUNS[output].format(**files).split(), "--json", str(file))
    assert status in (0, 1), err
    value = json.loads(file.read_text())
    assert value["schema"] == schema_name(output)
    assert next(iter(value)) == "schema"
    _, text, _ = call("schema", output)
    Draft202012Validator(json.loads(text)).validate(value)


def test_all_schemas_are_listed(call):
    status, out, _ = call("schema")
    assert status == 0
    assert [line.split() for line in out.splitlines()[1 : 1 + len(VERSIONS)]] == [
        [name, schema_name(name)] for name in VERSIONS
    ]


def test_a_schema_of_no_command_is_refused(call, assert_one_sentence):
    assert_one_sentence(call("schema", "demo"), "command")


def parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema, itself included."""
    yield schema
    inside = [*schema.get("properties", {}).values()]
    inside += [schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)]
    for part in inside:
        yield from parts(part)


@pytest.mark.parametrize("name", VERSIONS)
def test_every_value_is_described_and_objects_are_closed(name):
    schema = document(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == DIALECT
    assert schema["properties"]["schema"]["const"] == f"specsim/{name}/{VERSIONS[name]}" == schema["$id"]
    for part in parts(schema):
        assert part["description"].endswith(".")
        kind = part.get("type")
        if "object" in (kind if isinstance(kind, list) else [kind]):
            assert "additionalProperties" in part
        if "properties" in part:
            assert part["additionalProperties"] is False
            assert set(part["required"]) <= set(part["properties"])
        assert "array" not in (kind or ()) or "items" in part


def test_an_unknown_key_is_no_output():
    validator = Draft202012Validator(document("lint-report"))
    value = {"schema": "specsim/lint-report/1", "file": "a.json", "findings": []}
    assert validator.is_valid(value)
    assert not validator.is_valid(value | {"more": 1})
    assert not validator.is_valid(value | {"schema": "specsim/lint-report/0"})


KEPT = [*ROOT.glob("specsim/simulator/profiles/*.json"), ROOT / "specsim/models/shipped/tiny/acceptance.json"]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_shipped_results_follow_their_schemas(path):
    value = json.loads(path.read_text(encoding="utf-8"))
    Draft202012Validator(document(value["schema"].split("/")[1])).validate(value)


@dataclass(frozen=True)
class Sample:
    """A sample."""

    # mean over
    # all rows, nan for none
    mean: float
    kind: Literal["a", "b"] | None  # letter
    pair: tuple[float, float] = (0, 0)  # two of them
    counts: dict[str, int] | None = None
    token: int | str = 0  # id or text

    @property
    def double(self) -> float:
        """Twice the mean."""
        return 2 * self.mean


@dataclass(frozen=True)
class Counted:
    """Counts by name."""

    counts: dict[str, int] | None  # counts by name


def test_fields_have_the_types_of_the_class_and_its_comments():
    assert comments(Sample) == {
        "mean": "Mean over all rows, nan for none.",
        "kind": "Letter.",
        "pair": "Two of them.",
        "token": "Id or text.",
        "double": "Twice the mean.",
    }
    schema = type_schema(Annotated[Sample, "+double", "-counts", Counted])
    properties = schema["properties"]
    assert schema["description"] == "A sample."
    assert properties["mean"] == {"type": ["number", "null"], "description": "Mean over all rows, null for none."}
    assert (properties["kind"]["type"], properties["kind"]["enum"]) == (["string", "null"], ["a", "b", None])
    assert (properties["pair"]["minItems"], properties["pair"]["items"]["type"]) == (2, "number")
    assert properties["counts"]["type"] == ["object", "null"]
    assert properties["token"]["type"] == ["integer", "string"]
    assert properties["double"]["type"] == "number"
    assert type_schema(Annotated[Sample, "pair double"])["required"] == ["pair", "double"]
    with pytest.raises(ValueError, match=r"Sample\.counts has no comment"):
        type_schema(Sample)
