"""Records of SGLang's metrics: responses of several versions, server information, gauges and log."""

import json

import pytest

from specsim.acceptance.files import read_record
from specsim.core.errors import InputError
from specsim.simulator.acceptance_record import Counts
from specsim.simulator.tool_figures import contradiction

GAUGES = """# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.5
sglang:spec_accept_rate{model_name="m",tp_rank="0"} 0.5
sglang:spec_num_steps{model_name="m",tp_rank="0"} 3.0
sglang:spec_num_draft_tokens{model_name="m",tp_rank="0"} 4.0
"""
LOG = """[2026-01-01 10:00:00 TP0] Prefill batch, #new-seq: 1
[2026-01-01 10:00:01 TP0] Decode batch, #running-req: 1, #token: 90, token usage: 0.00, accept len: 3.00, accept rate: 0.67, cuda graph: True, gen throughput (token/s): 300.00, #queue-req: 0
[2026-01-01 10:00:02 TP0] Decode batch, #running-req: 3, #token: 90, token usage: 0.00, accept len: 2.00, accept rate: 0.33, cuda graph: True, gen throughput (token/s): 300.00, #queue-req: 0
"""  # noqa: E501


def response(**meta) -> dict:
    return {"text": "a", "meta_info": {"prompt_tokens": 5} | meta}


@pytest.fixture
def read(tmp_path):
    def made(value: object):
        path = tmp_path / "metrics"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return read_record(path)

    return made


@pytest.mark.parametrize("histogram", ["spec_accept_histogram", "spec_correct_drafts_histogram"])
def test_responses_are_counted_by_histogram(read, histogram):
    """The first token comes from prefill: 8 tokens of 3 rounds are no accept length of 8 / 3."""
    one = response(completion_tokens=8, spec_verify_ct=3, spec_accept_length=8 / 3, **{histogram: [1, 0, 2]})
    two = response(completion_tokens=4, spec_verify_ct=2, spec_accept_length=2.0, **{histogram: [1, 1]})
    found = read([one, two])
    assert found.counts == (Counts(3, 4, (2, 2)), Counts(2, 1, (1,)))
    assert found.accept_length == 2.0
    assert found.rates == (3 / 5, 2 / 5)
    assert (found.tool, found.rounds, found.is_by_request, found.num_steps) == ("sglang", 5, True, 2)
    assert found.reported_length is None  # another definition: with the token of prefill


def test_an_adaptive_chain_varies(read):
    """Ten rounds of 3 drafts and ten of 1: 40 drafts make no tree of 2, for rounds accepted 3."""
    found = read(response(spec_verify_ct=20, spec_accept_histogram=[5, 9, 2, 4], spec_proposed_drafts=40))
    assert (found.num_draft_tokens, found.mean_drafts) == (None, 2.0)
    assert found.full.rates == pytest.approx((0.75, 0.6, 0.4))


def test_ragged_verification_bounds_the_drafts_of_a_round(read):
    """Windows count the root: of 8 rounds 1, 2, 1 and 4 verified 0, 1, 2 and 3 drafts."""
    ragged = response(
        spec_verify_ct=8, spec_correct_drafts_histogram=[3, 2, 2, 1], spec_cap_lens_histogram=[0, 1, 2, 1, 4],
        spec_num_correct_drafts=9, spec_cap_length=3.0,
    )  # fmt: skip
    found = read(ragged)
    assert found.counts == (Counts(7, 9, (5, 3, 1), (7, 5, 3), undrafted=1),)
    assert found.proposed_drafts == 16
    assert found.stated[0].window_length.value == 3.0
    assert "".join(map(contradiction, found.stated)) == ""


@pytest.mark.parametrize(
    "wrong",
    [{"spec_cap_length": 2.0}, {"spec_cap_lens_histogram": [0, 8]}, {"spec_num_correct_drafts": 17}],
)
def test_ragged_figures_that_disagree_are_refused(read, wrong):
    figures = {"spec_cap_lens_histogram": [0, 1, 2, 1, 4], "spec_cap_length": 3.0, "spec_verify_ct": 8}
    with pytest.raises(InputError, match="figures that agree"):
        read(response(**figures | {"spec_correct_drafts_histogram": [3, 2, 2, 1]} | wrong))


def test_gauges_of_ragged_verification_bound_the_length(read):
    windows = "sglang:spec_cap_length{} {}\nsglang:spec_block_accept_length{} {}\n"
    labels = '{model_name="m",tp_rank="0"}'
    (stated,) = read(GAUGES + windows.format(labels, 3.1, labels, 2.75)).stated
    assert (stated.window_length.value, stated.full_length.value) == (3.1, 2.75)
    for window, full in ((2.0, 2.75), (3.1, 2.25)):
        with pytest.raises(InputError, match="figures that agree"):
            read(GAUGES + windows.format(labels, window, labels, full))


def test_a_stream_counts_its_last_response(read):
    parts = [response(id="x", spec_verify_ct=count, spec_accept_histogram=[0, count]) for count in (1, 2, 3)]
    parts.append(response(id="y", spec_verify_ct=1, spec_accept_histogram=[1]))
    found = read("".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n")
    assert found.counts == (Counts(3, 3, (3,)), Counts(1, 0))


def test_server_information_among_responses_gives_the_setting(read):
    one = response(spec_verify_ct=3, spec_accept_histogram=[1, 0, 2], spec_proposed_drafts=21)
    assert not read(one).is_chain  # 7 drafts of a round, at most 2 of them accepted: a tree or a bad chain
    setting = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    found = read(json.dumps(one) + "\n" + json.dumps(setting))
    assert (found.topk, found.num_steps, found.num_draft_tokens) == (4, 3, 8)
    assert found.counts == (Counts(3, 4, (2, 2, 0)),)


@pytest.mark.parametrize(
    ("drafts", "proposed"),
    [
        ("spec_accept_token_num", "spec_draft_token_num"),
        ("spec_accepted_drafts", "spec_proposed_drafts"),
        ("spec_num_correct_drafts", "spec_num_proposed_drafts"),
    ],
)
def test_counts_of_every_version_are_read(read, drafts, proposed):
    found = read(response(completion_tokens=9, spec_verify_ct=4, **{drafts: 5, proposed: 12}))
    assert found.counts == (Counts(4, 5),)
    assert found.accept_length == 1 + 5 / 4
    assert (found.num_draft_tokens, found.num_steps, found.rates) == (4, None, ())


def test_tokens_and_rounds_alone_leave_out_the_first_token(read):
    found = read(response(completion_tokens=9, spec_verify_ct=4))
    assert found.accept_length == 2.0  # 8 tokens of 4 rounds


def test_server_information_has_the_setting(read):
    setting = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    states = [{"avg_spec_accept_length": 2.5}, {"avg_spec_accept_length": 2.7}, {"last_gen_throughput": 3.0}]
    found = read({"model_path": "a/model", "internal_states": states} | setting)
    assert found.accept_length == pytest.approx(2.6)
    assert (found.topk, found.num_steps, found.num_draft_tokens, found.pair) == (4, 3, 8, "a/model")
    assert (found.rates, found.counts, found.rounds) == ((), (), None)
    assert not found.is_chain


def test_gauges_and_log_give_accept_lengths(read):
    gauges = read(GAUGES)
    assert (gauges.accept_length, gauges.num_steps, gauges.num_draft_tokens) == (2.5, 3, 4)
    assert read(LOG).accept_length == 2.25  # three times as many requests ran in the second interval


@pytest.mark.parametrize(
    "value",
    [
        response(spec_verify_ct=3),
        response(spec_verify_ct=3, spec_accept_histogram=[1, -2]),
        response(spec_verify_ct=0.5, completion_tokens=3),
        response(spec_verify_ct=3, spec_accept_histogram=5),
        response(id=["x"], spec_verify_ct=3, spec_accept_histogram=[1, 2]),
        GAUGES.replace("4.0", "4.5"),
        GAUGES.replace("3.0", "2e9"),
        LOG.replace("3.00", "3.0.0"),
        LOG.replace("#running-req: 1", "#running-req: " + "9" * 5000),
        {"internal_states": [{"avg_spec_accept_length": "long"}]},
        {"internal_states": [{"avg_spec_accept_length": 0.2}]},
    ],
)
def test_impossible_metrics_are_refused(read, value):
    with pytest.raises(InputError):
        read(value)
