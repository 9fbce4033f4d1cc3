"""Records of vLLM's metrics: responses, Prometheus counters and log, in the formats of its documentation."""

import json

import pytest

from specsim.acceptance.files import read_record, read_records
from specsim.acceptance.record_prediction import predict_from
from specsim.acceptance.vllm_metrics import LENGTH_ROUNDING
from specsim.core.errors import InputError
from specsim.simulator.acceptance_record import Counts

# As in https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/
SUMMARY = {
    "mean_acceptance_length": 1.2325581395348837, "draft_acceptance_rate": 0.07751937984496124,
    "acceptance_histogram": [39, 1, 0, 3], "acceptance_histogram_by_draft_length": {"3": [39, 1, 0, 3]},
    "num_spec_steps": 43, "num_accepted_draft_tokens": 10, "num_draft_tokens": 129, "num_spec_tokens": 3,
}  # fmt: skip
ADAPTIVE = {
    "mean_acceptance_length": 1.9, "acceptance_histogram": [4, 4, 1, 1],
    "acceptance_histogram_by_draft_length": {"3": [0, 2, 1, 1], "1": [2, 2], "0": [2]},
    "num_spec_steps": 10, "num_accepted_draft_tokens": 9, "num_draft_tokens": 16, "num_spec_tokens": 3,
}  # fmt: skip
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a/model"} 600.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a/model"} 400.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="a/model"} 1.753e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a/model"} 1200.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="a/model"} 800.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a/model"} 700.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="a/model"} 500.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a/model",position="0"} 400.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a/model",position="1"} 300.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a/model",position="0"} 300.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a/model",position="1"} 200.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="a/model",position="0"} 1.753e+09
"""
LOG = (
    "INFO 07-01 12:00:0{second} [metrics.py:96] SpecDecoding metrics: Mean acceptance length: {length}, Accepted "
    "throughput: 16.00 tokens/s, Drafted throughput: 30.00 tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} "
    "tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance rate: {average:.1f}%\n"
)


def log_line(**figures) -> str:
    """Write the line of an interval, its average rate that of the drafts."""
    accepted, drafted = figures["accepted"], figures["drafted"]
    average = 100 * int(accepted) / drafted if drafted and len(str(accepted)) < 20 else 0.0
    return LOG.format(**figures, average=average)


def response(metrics: dict | None) -> dict:
    return {"choices": [], "usage": {"completion_tokens": 53}, "metrics": {"speculative_decoding": metrics}}


@pytest.fixture
def write(tmp_path):
    def made(text: str, name: str = "metrics.txt") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return made


def test_responses_are_pooled_by_request(write):
    lines = [response(SUMMARY), response(ADAPTIVE), response(None)]
    found = read_record(write("".join(json.dumps(line) + "\n" for line in lines)))
    assert found.counts == (Counts(43, 10, (4, 3, 3), (43, 4, 3)), Counts(8, 9, (6, 2, 1), (8, 4, 2), undrafted=2))
    assert found.is_by_request
    assert (found.tool, found.topk, found.num_steps, found.rounds) == ("vllm", 1, 3, 51)
    assert found.accept_length == 1 + 19 / 51
    assert found.reported_length is None  # it counts rounds without drafts
    assert (found.proposed_drafts, found.mean_drafts) == (145, 145 / 51)


def test_detailed_steps_say_what_was_proposed(write):
    steps = {"per_step_accepted": [2, 0, 1], "per_step_drafted": [3, 1, 1]}
    detailed = {"acceptance_histogram": [1, 1, 1, 0], "num_spec_steps": 3, "num_spec_tokens": 3} | steps
    found = read_record(write(json.dumps(response(detailed))))
    assert found.counts == (Counts(3, 3, (2, 1, 0), (3, 1, 1)),)


def test_counters_are_added_over_engines(write):
    found = read_record(write(METRICS))
    assert found.counts == (Counts(1000, 1200, (700, 500)),)
    assert found.accept_length == 2.2  # 1 + accepted drafts / rounds: the bonus token is included
    assert found.rates == (0.7, 0.5)
    assert (found.pair, found.proposed_drafts, found.is_by_request) == ("a/model", 2000, False)
    assert read_record(write(METRICS.replace("_total{", "{"))) == found


def test_drafts_that_vary_by_round_give_full_rounds(write):
    page = METRICS.replace("1200.0", "1000.0").replace("800.0", "600.0")  # 600 of 1000 rounds proposed two drafts
    found = read_record(write(page))
    assert (found.accept_length, found.mean_drafts, found.reached) == (2.2, 1.6, ())
    assert found.full.rates == pytest.approx((0.7, 0.7))  # 500 / 600, but no rate lies above the one before
    page = page.replace(" 200.0", " 100.0").replace(" 500.0", " 400.0")
    found = read_record(write(page))
    assert found.full.rates == pytest.approx((0.7, 400 / 600))
    assert found.full.low == found.full.high == pytest.approx(1.7 + 400 / 600)
    assert found.conditional == pytest.approx((0.7, 400 / 600 / 0.7))
    expected = {row.config.num_steps: row for row in predict_from(found).rows}
    assert expected[2].accept_length == pytest.approx(1.7 + 400 / 600)
    assert not expected[2].is_measured
    assert any("1.60 of 2 drafts" in clause for clause in predict_from(found).assumed)


def test_each_model_of_a_server_is_a_record(write):
    path = write(METRICS + METRICS.replace("a/model", "another"))
    assert [each.pair for each in read_records(path)] == ["a/model", "another"]
    assert read_record(f"{path}#2").pair == "another"
    with pytest.raises(InputError, check=lambda error: error.name == "acceptance" and "#2 (another" in error.allowed):
        read_record(path)


def test_intervals_of_a_log_are_added(write):
    rates = "0.730, 0.520, 0.350"
    one = log_line(second=1, length="2.60", accepted=1600, drafted=3000, rates=rates)
    idle = log_line(second=2, length="nan", accepted=0, drafted=0, rates="nan, nan, nan")
    two = log_line(second=3, length="1.50", accepted=100, drafted=600, rates="0.300, 0.150, 0.050")
    found = read_record(write("INFO something else\n" + one + idle + two))
    assert found.counts == (Counts(1200, 1700, (790, 550, 360)),)
    assert found.accept_length == pytest.approx(2.4167, abs=1e-4)
    assert found.reported_length == pytest.approx((2.6 * 1000 + 1.5 * 200) / 1200)
    assert found.reported_rounding == LENGTH_ROUNDING


def test_rounds_of_a_log_follow_from_accepted_drafts(write):
    """Drafts of varying number: 400 rounds of 600 drafts accept 500."""
    line = log_line(second=1, length="2.25", accepted=500, drafted=600, rates="0.750, 0.500")
    found = read_record(write(line))
    assert found.rounds == 400
    assert found.rates == (0.75, 0.5)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(response(SUMMARY | {"acceptance_histogram_by_draft_length": {"x": [1]}})),
        json.dumps(response(SUMMARY | {"acceptance_histogram_by_draft_length": None, "acceptance_histogram": "all"})),
        json.dumps(response(SUMMARY | {"num_spec_tokens": -1})),
        json.dumps(response(SUMMARY | {"acceptance_histogram_by_draft_length": {"3": [0.5, 1]}})),
        METRICS.replace("700.0", "600.5").replace("400.0", "400.5"),
        METRICS.replace('position="0"', 'position="first"'),
        json.dumps(response(SUMMARY | {"num_spec_tokens": 10**9})),
        json.dumps(response(SUMMARY | {"per_step_accepted": [0, 1], "per_step_drafted": [2]})),
        json.dumps(response(SUMMARY | {"per_step_accepted": [0, 3], "per_step_drafted": [2, 2]})),
        log_line(second=1, length="1.2.3", accepted=3, drafted=6, rates="0.5, 0.5"),
        log_line(second=1, length="1.50", accepted=3, drafted=6, rates="0.5, 0..5"),
        log_line(second=1, length="1.50", accepted=3, drafted=6, rates="0.0, 0.0"),
        log_line(second=1, length="1.50", accepted="9" * 5000, drafted=6, rates="0.5, 0.5"),
        log_line(second=1, length="1.00", accepted=0, drafted=0, rates="0.0, 0.0"),
    ],
)
def test_impossible_counts_are_refused(write, text):
    with pytest.raises(InputError):
        read_record(write(text))
