"""Pages of --html: rounds of generate and run, and the first mismatch of diff."""

import json
import re

import pytest
from jsonschema import Draft202012Validator

from specsim.cli.schema import document as schema_document

pytestmark = pytest.mark.usefixtures("shipped")
SCHEMA = Draft202012Validator(schema_document("exploration"))
REQUESTS = [{"prompt": "def f", "max_new_tokens": 5}, {"prompt": "import", "max_new_tokens": 9}]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "page.html"


def data_of(path):
    """Read the document of a page."""
    text = re.search(r'<script type="application/json" id="exploration">(.*?)</script>', path.read_text(), re.DOTALL)
    value = json.loads(text[1])
    SCHEMA.validate(value)
    return value


def test_generate_writes_its_rounds(call, file, tmp_path):
    both = ["--html", str(file), "--json", str(tmp_path / "out.json")]
    status, out, err = call("generate", "--prompt", "def f", "--max-new-tokens", "12", *both)
    assert (status, err) == (0, "")
    value = data_of(file)
    made = json.loads((tmp_path / "out.json").read_text())
    counts = made["outputs"][0]["num_accepted_tokens_per_round"]
    assert [len(each["requests"][0]["path"]) for each in value["rounds"]] == counts
    assert value["requests"][0]["output"] == made["outputs"][0]["token_ids"]
    assert "--html" not in made["command"]
    plain = call("generate", "--prompt", "def f", "--max-new-tokens", "12")[1]
    assert out.splitlines()[:3] == plain.splitlines()[:3]


def test_generate_writes_a_page_of_a_run_without_rounds(call, file):
    assert call("generate", "--max-new-tokens", "1", "--html", str(file))[0] == 0
    assert data_of(file)["rounds"] == []


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_run_writes_the_rounds_of_its_requests(call, file, tmp_path, schedule):
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(f"{json.dumps(each)}\n" for each in REQUESTS))
    output = tmp_path / "out.json"
    status, _, err = call(
        "run", "--requests", str(requests), "--schedule", schedule, "--html", str(file), "--json", str(output)
    )
    assert status == 0, err
    value = data_of(file)
    served = json.loads(output.read_text())["outputs"]
    for place, request in enumerate(served):
        rounds = [own for each in value["rounds"] for own in each["requests"] if own["request"] == place]
        counts = request["num_accepted_tokens_per_round"]
        assert [len(own["path"]) for own in rounds][: len(counts)] == counts


def test_diff_without_a_mismatch_writes_no_page(call, file):
    status, out, _ = call(
        "diff", "--topk", "1", "--num-steps", "1", "--batch", "1", "--impl", "reference", "--html", str(file)
    )
    assert status == 0
    assert "There is no mismatch to draw" in out
    assert not file.exists()


def test_diff_writes_its_first_mismatch(call, file, monkeypatch):
    pytest.importorskip("triton")
    from specsim.fast.engine import Engine

    draft = Engine.draft

    def wrong(*given, **named):
        made = draft(*given, **named)
        made.draft_tokens[0, -1] += 1
        return made

    monkeypatch.setattr(Engine, "draft", wrong)
    status, out, err = call("diff", "--topk", "1", "--num-steps", "1", "--batch", "1", "--html", str(file))
    assert status == 1, err
    value = data_of(file)
    found = value["mismatch"]
    assert (found["field"], found["impl"], found["step"]) == ("draft_tokens", "fast", "select")
    assert f"{found['field']} is {found['other']}, the reference has {found['reference']}" in " ".join(out.split())
    own, other = value["rounds"][0]["requests"][0], value["other"][0]["requests"][0]
    assert other["nodes"]["tokens"][1] == own["nodes"]["tokens"][1] + 1
