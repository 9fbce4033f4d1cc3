"""Acceptance with KV in fp8: the kept table, and some of its counts measured again."""

import json

import pytest

from specsim.maintain import kv_acceptance
from specsim.maintain.kv_acceptance import CONFIGS, FILE, FORMATS, measured


def kept_rows():
    return json.loads(FILE.read_text(encoding="utf-8"))


def test_every_format_is_kept_with_every_tree():
    rows = {(row["kv_dtype"], row["draft_kv_dtype"], row["topk"]) for row in kept_rows()}
    assert rows == {(*formats, config.topk) for formats in FORMATS for config in CONFIGS}
    assert len({(row["prompts"], len(row["counts"])) for row in kept_rows()}) == 1


@pytest.mark.parametrize("formats", [FORMATS[0], FORMATS[-1]], ids=["model", "fp8"])
def test_the_first_prompts_have_the_kept_counts(formats):
    kept = next(row for row in kept_rows() if (row["kv_dtype"], row["draft_kv_dtype"]) == formats)
    again = measured(CONFIGS[0], *formats, count=3)
    assert [[each.rounds, each.accepted_drafts] for each in again.counts] == kept["counts"][:3]


def test_the_table_has_a_line_for_every_format(tmp_path):
    lines = [line for line in kv_acceptance.table().splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(FORMATS)
    assert lines[1].startswith("| model | model | ")
