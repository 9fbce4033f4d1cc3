"""Schemas of the JSON outputs: kept documents are those of the code, and describe every value."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator

from specsim.core.json_schema import VERSIONS
from specsim.maintain.schemas.dataclass_fields import comments, described
from specsim.maintain.schemas.document import nullable
from specsim.maintain.schemas.kept import DIALECT, FOLDER, OUTPUTS, documents, encoded, write

MADE = documents()


def parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema, itself included."""
    yield schema
    inside = [*schema.get("properties", {}).values()]
    inside += [schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)]
    for each in inside:
        yield from parts(each)


def test_kept_documents_are_those_of_the_code():
    assert set(OUTPUTS) == set(VERSIONS) == {path.stem for path in FOLDER.glob("*.json")}
    for name, document in MADE.items():
        same = (FOLDER / f"{name}.json").read_text(encoding="utf-8") == encoded(document)
        assert same, f"{name}: run python -m specsim.maintain.schemas"


@pytest.mark.parametrize("name", VERSIONS)
def test_every_value_is_described_and_objects_are_closed(name):
    document = MADE[name]
    Draft202012Validator.check_schema(document)
    assert document["$schema"] == DIALECT
    assert document["properties"]["schema"]["const"] == f"specsim/{name}/{VERSIONS[name]}" == document["$id"]
    for part in parts(document):
        assert part["description"].endswith(".")
        kind = part.get("type")
        if "object" in (kind if isinstance(kind, list) else [kind]):
            assert "additionalProperties" in part
        if "properties" in part:
            assert part["additionalProperties"] is False
            assert set(part["required"]) <= set(part["properties"])
        assert "array" not in (kind or ()) or "items" in part


def test_an_unknown_key_is_no_output():
    validator = Draft202012Validator(MADE["lint-report"])
    value = {"schema": "specsim/lint-report/1", "file": "a.json", "findings": []}
    assert validator.is_valid(value)
    assert not validator.is_valid(value | {"more": 1})
    assert not validator.is_valid(value | {"schema": "specsim/lint-report/0"})


def test_writing_removes_documents_of_no_output(tmp_path):
    (tmp_path / "old.json").touch()
    assert {path.stem for path in write(tmp_path)} == set(VERSIONS) == {path.stem for path in tmp_path.iterdir()}


@dataclass(frozen=True)
class Sample:
    # mean over
    # all rows, nan for none
    mean: float
    kind: Literal["a", "b"] | None  # letter
    pair: tuple[float, float] = (0, 0)  # two of them
    counts: dict[str, int] | None = None
    token: int | str = 0  # id or text


def test_fields_have_the_types_of_the_class_and_its_comments():
    assert comments(Sample) == {
        "mean": "Mean over all rows, nan for none.",
        "kind": "Letter.",
        "pair": "Two of them.",
        "token": "Id or text.",
    }
    made = described(Sample, "A sample.", counts="Counts by name.")["properties"]
    assert made["mean"]["type"] == ["number", "null"]
    assert (made["kind"]["type"], made["kind"]["enum"]) == (["string", "null"], ["a", "b", None])
    assert (made["pair"]["minItems"], made["pair"]["items"]["type"]) == (2, "number")
    assert made["counts"]["type"] == ["object", "null"]
    assert made["token"]["type"] == ["integer", "string"]
    assert nullable(made["token"])["type"] == ["integer", "string", "null"]
    with pytest.raises(ValueError, match=r"Sample\.counts has neither a comment nor a description"):
        described(Sample, "A sample.")
    with pytest.raises(ValueError, match="Sample has no field size"):
        described(Sample, "A sample.", counts="Counts.", size="Size.")


def test_documents_are_plain_json():
    assert json.loads(json.dumps(MADE)) == MADE
