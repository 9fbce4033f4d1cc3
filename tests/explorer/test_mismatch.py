"""Page of a mismatch: both sides of the round, opened at the first field that differs."""

import json
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from specsim.cli.schema import document as schema_document
from specsim.core.config import SpecConfig
from specsim.correctness.differential import check
from specsim.correctness.differential.cell import one_cell
from specsim.explorer.document import encoded
from specsim.explorer.explore import write_page
from specsim.explorer.mismatch import mismatch_document

CONFIG = SpecConfig(topk=3, num_steps=2, num_draft_tokens=6, page_size=4)
SCHEMA = Draft202012Validator(schema_document("exploration"))


class Wrong:
    """An engine with a wrong phase."""

    def __init__(self, engine, phase, spoil):
        self._engine = engine
        setattr(self, phase, lambda *given: spoil(getattr(engine, phase)(*given)))

    def __getattr__(self, name):
        return getattr(self._engine, name)


def wrong_bonus(output):
    """Give request 1 another bonus token."""
    verdict = output.verdict
    predict = verdict.predict.clone()
    node = int(verdict.accept_index[1, int(verdict.num_accepted_drafts[1])])
    predict[node] = (predict[node] + 1) % 40
    return replace(output, verdict=replace(verdict, predict=predict))


def wrong_mask(output):
    """Hide the root from node 2 of request 0."""
    mask = output.mask.clone()
    mask[0, 2, 0] = False
    return replace(output, mask=mask)


def crash(output):
    raise RuntimeError("no result")


def no_logits(output):
    """Lose the target's distribution, so that nothing can be drawn."""
    return replace(output, target_logits=output.target_logits[:2])


def document_of(phase, spoil):
    """Compare the reference with itself, one phase wrong, and make the document of the first difference."""
    cell = one_cell(CONFIG, 0.0, "eagle3-llama", 2, "lockstep", "eager")

    def wrap(each):
        return replace(each, engine=Wrong(each.engine, phase, spoil))

    first = check(cell, "reference", wrap=wrap).first_divergence
    value = mismatch_document(cell, first, "reference", wrap=wrap)
    SCHEMA.validate(json.loads(encoded(value)))
    return first, value


def test_a_wrong_token_opens_at_verify_with_both_sides(open_page, tmp_path):
    first, value = document_of("verify", wrong_bonus)
    own, other = value["rounds"][0]["requests"][1], value["other"][0]["requests"][1]
    found = value["mismatch"]
    assert (found["field"], found["step"], found["request"]) == ("predict", "verify", 1) == (first.field, "verify", 1)
    assert (own["bonus"], other["bonus"]) == (int(found["reference"]), int(found["other"]))
    assert own["nodes"] == other["nodes"]
    write_page(tmp_path / "mismatch.html", value, "a mismatch")
    for width in (1280, 400):
        opened = open_page(tmp_path / "mismatch.html", width)
        assert opened.text(".mismatch strong") == f"First difference: predict, entry {found['entry']}"
        assert f"reference: {found['reference']}" in opened.text(".mismatch")
        assert opened.values("[aria-current]", "step") == ["verify"]
        assert opened.page.input_value("select[aria-label=Request]") == "1"
        assert opened.texts(".side h4") == ["reference", "reference under test"]
        assert opened.texts(".node.bonus .token") == [f"<{own['bonus']}>", f"<{other['bonus']}>"]
        assert opened.page.locator(".node.bonus.differs").count() == 2
        assert opened.values(".node.pointed", "node") == [str(found["node"])] * 2
        for step in opened.steps():
            opened.go(step)
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
            assert opened.page.locator(".side").count() == 2


def test_a_wrong_mask_opens_at_the_mask(open_page, tmp_path):
    _, value = document_of("draft", wrong_mask)
    assert value["mismatch"]["field"] == "mask"
    write_page(tmp_path / "mismatch.html", value, "a mismatch")
    opened = open_page(tmp_path / "mismatch.html")
    assert opened.values("[aria-current]", "step") == ["mask"]
    assert opened.values(".node.pointed", "node") == ["2", "2"]
    sees = opened.texts(".panel h5")
    assert sees[0].endswith("nodes 0, 2")
    assert sees[1].endswith("nodes 2")


@pytest.mark.parametrize(("phase", "spoil"), [("verify", crash), ("verify", no_logits), ("prefill", crash)])
def test_a_side_that_cannot_be_drawn_is_named(open_page, tmp_path, phase, spoil):
    first, value = document_of(phase, spoil)
    assert value["other"] == []
    assert "reference under test" in value["mismatch"]["note"]
    assert len(value["rounds"]) == (phase != "prefill")
    write_page(tmp_path / "mismatch.html", value, "a mismatch")
    opened = open_page(tmp_path / "mismatch.html", settled=".mismatch")
    assert first.field in opened.text(".mismatch strong")
    assert value["mismatch"]["note"] in opened.text(".mismatch")
