"""Records of AIPerf's exports."""

import json

import pytest

from specsim.acceptance.files import read_record
from specsim.core.errors import InputError
from specsim.simulator.acceptance_record import Counts

# In the form of https://docs.nvidia.com/aiperf/reference/per-request-speculative-decoding-acceptance
RECORD = {
    "engine": "vllm", "mean_acceptance_length": 1 + 7 / 9, "draft_acceptance_rate": 7 / 45,
    "acceptance_histogram": {"0": 5, "1": 2, "3": 1, "2": 1, "5": 0}, "num_accepted_draft_tokens": 7,
    "num_draft_tokens": 45, "num_spec_steps": 9, "num_spec_tokens": 5,
}  # fmt: skip


def test_records_of_requests_are_counted(tmp_path):
    more = RECORD | {"num_spec_tokens": 6}  # of a run that adapts its drafts
    lines = [{"metadata": {}, "metrics": {}, "spec_decode_acceptance": each} for each in (more, None, RECORD)]
    path = tmp_path / "profile_export.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_record(path)
    assert found.counts == (Counts(9, 7, (4, 2, 1, 0, 0, 0)), Counts(9, 7, (4, 2, 1, 0, 0)))
    assert (found.tool, found.num_steps, found.is_by_request) == ("aiperf vllm", 6, True)
    assert found.accept_length == 1 + 14 / 18
    assert (found.reported_length, found.proposed_drafts) == (1 + 7 / 9, 90)


def test_the_pooled_histogram_of_a_run_is_counted(tmp_path):
    path = tmp_path / "profile_export_aiperf.json"
    pooled = {"0": 6400, "1": 4608, "2": 3840, "3": 3328, "4": 3072, "5": 4352}
    path.write_text(json.dumps({"schema_version": "1.0", "pooled_spec_decode_acceptance_histogram": pooled}))
    found = read_record(path)
    assert found.rounds == sum(pooled.values())
    assert found.accept_length == 1 + sum(int(drafts) * count for drafts, count in pooled.items()) / found.rounds
    assert not found.is_by_request


HISTOGRAMS = [[1, 2.5], {"one": 3}, "many", {"0": -1}, {"0": 5, str(10**12): 1}, [1] * 2000, None]


@pytest.mark.parametrize("histogram", HISTOGRAMS)
def test_a_histogram_of_something_else_is_refused(tmp_path, histogram):
    path = tmp_path / "profile_export.jsonl"
    path.write_text(json.dumps({"spec_decode_acceptance": RECORD | {"acceptance_histogram": histogram}}))
    with pytest.raises(InputError):
        read_record(path)
