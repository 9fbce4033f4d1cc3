"""The kept documents, one per output, in JSON Schema draft 2020-12."""

import json
from collections.abc import Callable
from pathlib import Path

import specsim
from specsim.core.json_schema import VERSIONS, schema_name
from specsim.maintain.schemas import (
    acceptance_records,
    calibration,
    correctness,
    exploration,
    measuring,
    serving,
    simulation,
)
from specsim.maintain.schemas.document import Schema

FOLDER = Path(specsim.__file__).parent / "cli" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
OUTPUTS: dict[str, Callable[[], Schema]] = {
    "accept": measuring.accept,
    "acceptance": acceptance_records.acceptance_record,
    "bench": measuring.bench,
    "calibrate": calibration.calibrate,
    "calibrate-published": calibration.calibrate_published,
    "certify": correctness.certify,
    "conformance": correctness.conformance,
    "diff": correctness.diff,
    "explain": correctness.explain,
    "exploration": exploration.exploration,
    "faults": correctness.faults,
    "generate": serving.generate,
    "lint-report": simulation.lint_report,
    "plan": simulation.plan,
    "predict": measuring.predict,
    "predict-record": acceptance_records.predict_record,
    "profile": calibration.profile,
    "run": serving.run,
    "run-compare": serving.run_compare,
    "sampling-test": correctness.sampling_test,
    "simulate": simulation.simulate,
    "simulate-table": simulation.simulate_table,
    "soak": correctness.soak,
    "sweep": simulation.sweep,
}


def documents() -> dict[str, Schema]:
    """Make every document, by output."""
    return {name: _document(name) for name in VERSIONS}


def write(folder: Path) -> list[Path]:
    """Write every document, and remove those of outputs that there are no more."""
    folder.mkdir(exist_ok=True)
    made = documents()
    for path in folder.glob("*.json"):
        if path.stem not in made:
            path.unlink()
    for name, document in made.items():
        (folder / f"{name}.json").write_text(encoded(document), encoding="utf-8")
    return [folder / f"{name}.json" for name in made]


def encoded(document: Schema) -> str:
    """Write a document as the text of its file."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _document(name: str) -> Schema:
    body = OUTPUTS[name]()
    version = {"type": "string", "description": "Name and version of this format.", "const": schema_name(name)}
    body["properties"] = {"schema": version} | body["properties"]
    body["required"] = ["schema", *body["required"]]
    return {"$schema": DIALECT, "$id": schema_name(name), "title": f"specsim {name}"} | body
