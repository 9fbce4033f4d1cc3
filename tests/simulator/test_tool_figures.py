"""Figures that a tool states of one quantity agree, or are called contradictions, each by the identity of that name."""

from dataclasses import replace

import pytest

from specsim.acceptance.files import read_record, read_records
from specsim.core.errors import InputError
from specsim.core.limits import half_unit
from specsim.simulator.measurement import Rounded
from specsim.simulator.tool_figures import BOUNDS, QUANTITIES, ToolFigures, common_steps, contradiction, verdicts


def number(value: float, unit: float = 0.0) -> Rounded:
    return Rounded.of(value, unit)


# 20 rounds of 3 drafts that accept 8 x 0, 6 x 2 and 6 x 3 drafts; the prefill gives one more token.
WHOLE = ToolFigures(
    "all",
    rounds=number(20),
    accepted=number(30),
    proposed=number(60),
    accept_length=number(2.5),
    accept_rate=number(0.5),
    histogram=(8, 0, 6, 6),
    rates=(number(0.6), number(0.6), number(0.3)),
    tokens=number(51),
    tokens_a_round=number(2.55),
    num_steps=3,
    interval=(number(2.4), number(2.7)),
    window_length=number(4),
    windows=(0, 0, 0, 0, 20),
    full_length=number(2.5),
)
NONE = ToolFigures("none")
CHANGES = {
    "rounds: all figures agree": [{"rounds": number(21)}, {"histogram": (8, 0, 6, 7)}],
    "accepted drafts: all figures agree": [{"accepted": number(31)}, {"histogram": (7, 1, 6, 6)}],
    "accept length: all figures agree": [
        {"accept_length": number(2.51)}, {"rates": (number(0.6), number(0.6), number(0.29))}, {"accepted": number(33)},
    ],
    "accept rate: all figures agree": [{"accept_rate": number(0.52)}, {"proposed": number(57)}],
    "verified nodes a round: all figures agree": [{"window_length": number(3)}, {"windows": (0, 0, 0, 1, 19)}],
    "accepted ≤ the drafts of the windows": [{"windows": (0, 11, 0, 0, 9)}],
    "accept_length ≤ window_length": [{"window_length": number(2.4)}],
    "accept_length ≤ full_length": [{"full_length": number(2.4)}],
    "tokens a round: all figures agree": [{"tokens_a_round": number(2.6)}, {"tokens": number(50)}],
    "accepted ≤ proposed": [{"proposed": number(29)}],
    "the drafts of the histogram ≤ proposed": [{"proposed": number(29)}],
    "proposed ≤ steps · rounds": [{"num_steps": 2}],
    "the drafts of the histogram ≤ steps · rounds": [{"num_steps": 1}],
    "tokens ≤ 1 + rounds + accepted drafts": [{"tokens": number(52)}],
    "accept_rate ≤ 1": [{"accept_rate": number(1.1)}],
    "the interval's low ≤ accept_length": [{"interval": (number(2.6), number(2.7))}],
    "accept_length ≤ the interval's high": [{"interval": (number(2.2), number(2.4))}],
}  # fmt: skip


def broken(figures: ToolFigures) -> set[str]:
    return {identity for identity, verdict, _ in verdicts(figures) if verdict == "cannot be true"}


def test_figures_that_agree_hold_every_identity():
    found = list(verdicts(WHOLE))
    assert {verdict for _, verdict, _ in found} == {"holds"}
    assert {identity for identity, *_ in found} == set(CHANGES)
    assert {f"{name} ≤ {bound}" for name, _, bound, _ in BOUNDS} | {
        f"{name}: all figures agree" for name in QUANTITIES
    } == set(CHANGES)
    assert list(verdicts(NONE)) == []
    assert contradiction(WHOLE) == ""


@pytest.mark.parametrize(
    ("identity", "change"), [(name, change) for name, changes in CHANGES.items() for change in changes]
)
def test_each_figure_alone_breaks_its_identity(identity, change):
    changed = replace(WHOLE, **change)
    assert identity in broken(changed)
    assert contradiction(changed).startswith("all: ")


def test_a_printed_figure_stands_for_all_that_are_printed_alike():
    printed = replace(WHOLE, accept_length=number(2.51, 0.01), accept_rate=number(0.5, 0.005))
    assert broken(printed) == set()
    assert broken(replace(printed, accept_rate=number(0.51, 0.005))) == {"accept rate: all figures agree"}
    for text, unit in (("600.0", 0.0), ("742507", 0.0), ("2.5", 0.05), ("1.12501e+06", 5.0), ("6e1", 5.0)):
        assert half_unit(text) == pytest.approx(unit)


@pytest.mark.parametrize(
    ("length", "rate", "is_per_node", "steps", "is_possible"),
    [
        (3.2, 0.7333, False, 3, True),
        (2.61, 0.54, True, 3, True),
        (2.53, 0.91, True, None, False),
        (2.0, 0.5, True, None, True),  # 2 drafts, or 4 nodes of an older version
        (2.0, 0.5, False, 2, True),
    ],
)
def test_drafts_of_a_round_follow_from_length_and_rate(length, rate, is_per_node, steps, is_possible):
    figures = ToolFigures(
        "line 1", accept_length=number(length, 0.005), accept_rate=number(rate, 0.005), is_per_node=is_per_node
    )
    assert common_steps([figures, NONE]) == steps
    assert (broken(figures) == set()) == is_possible
    if steps:
        assert broken(replace(figures, num_steps=steps)) == set()
        assert broken(replace(figures, num_steps=steps + 3)) == {"accept length = 1 + K · accept rate"}
    ambiguous = ToolFigures(
        "line 2", accept_length=number(3.0, 0.005), accept_rate=number(0.67, 0.005), is_per_node=True
    )
    assert common_steps([ambiguous]) == 3


AIPERF = (
    '{"total_spec_decode_steps": {"avg": 20}, "total_accepted_draft_tokens": {"avg": 30}, '
    '"spec_decode_token_weighted_acceptance_length": {"unit": "ratio", "avg": 2.5}, '
    '"spec_decode_overall_draft_acceptance_rate": {"unit": "%", "avg": 50.0}, '
    '"pooled_spec_decode_acceptance_histogram": {"0": 8, "2": 6, "3": 6}}'
)
DETAILS = (
    '{"sglext": {"spec_tokens_details": {"spec_accept_rate": 0.5, "spec_accept_length": 2.55, "spec_verify_ct": 20, '
    '"spec_num_correct_drafts": 30, "spec_num_proposed_drafts": 60, "spec_correct_drafts_histogram": [8, 0, 6, 6]}}}'
)
LOG = (
    "SpecDecoding metrics: Mean acceptance length: 3.15, Accepted throughput: 9.00 tokens/s, Drafted throughput: 18.00 "
    "tokens/s, Accepted: 2150 tokens, Drafted: 4000 tokens, Per-position acceptance rate: 0.820, 0.610, 0.430, 0.290, "
    "Avg Draft acceptance rate: 53.8%"
)
BATCH = "Decode batch, #running-req: 8, accept len: 2.61, accept rate: 0.54, #queue-req: 0,"
GAUGES = 'sglang:spec_accept_length{tp_rank="0"} 3.2\nsglang:spec_accept_rate{tp_rank="0"} 0.7333\n'
COUNTERS = (
    "vllm:spec_decode_num_drafts_total 20\nvllm:spec_decode_num_draft_tokens_total 40\n"
    "vllm:spec_decode_num_accepted_tokens_total 18\n"
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 12\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 6\n'
)
TENSORRT = (
    '{"choices": [{"speculative_decoding": {"acceptance_rate": 0.5, "total_accepted_draft_tokens": 30, '
    '"total_draft_tokens": 60, "num_spec_steps": 20, "acceptance_histogram": [8, 0, 6, 6], "num_spec_tokens": 3}}]}'
)


@pytest.mark.parametrize(
    ("text", "mine", "theirs"),
    [
        (AIPERF, '"avg": 2.5}', '"avg": 3.5}'),
        (AIPERF, '"avg": 30}', '"avg": 50}'),
        (AIPERF, '"avg": 50.0', '"avg": 70.0'),
        (DETAILS, '"spec_num_correct_drafts": 30', '"spec_num_correct_drafts": 35'),
        (DETAILS, "0.5,", "0.7,"),
        (LOG, "53.8%", "83.8%"),
        (BATCH, "0.54", "0.91"),
        (GAUGES, "0.7333", "0.64"),
        (COUNTERS, "total 18", "total 19"),
        (TENSORRT, "0.5", "0.6"),
        (TENSORRT, '"total_accepted_draft_tokens": 30', '"total_accepted_draft_tokens": 31'),
    ],
)
def test_a_file_that_contradicts_itself_is_named_and_refused(text, mine, theirs, tmp_path, call):
    path = tmp_path / "metrics.txt"
    for changed, status in ((text, 0), (text.replace(mine, theirs), 1)):
        path.write_text(changed)
        code, shown, _ = call("lint-report", str(path))
        assert (code, "cannot be true" in shown) == (status, bool(status))
        assert len(read_records(path)) == 1
        if status:
            with pytest.raises(InputError, match="figures that agree"):
                read_record(path)
        else:
            read_record(path)


def test_steps_of_gauges_and_logs_follow_from_their_rates(tmp_path):
    for text in (GAUGES, BATCH):
        (tmp_path / "metrics.txt").write_text(text)
        assert read_record(tmp_path / "metrics.txt").num_steps == 3


META = (
    '{"meta_info": {"id": "c", "completion_tokens": 300, "spec_verify_ct": 250, "spec_accept_token_num": 49, '
    '"spec_draft_token_num": 1250}}'
)


def test_steps_that_a_file_does_not_say_are_those_of_the_option(tmp_path, call):
    (path := tmp_path / "meta.jsonl").write_text(META)
    words = ("simulate", "--requests", "4", "--acceptance", str(path))
    status, shown, _ = call(*words, "--num-steps", "5")
    assert status == 0
    assert "Accept length 1.20, from 1.20 at 5 steps" in " ".join(shown.split())
    (tmp_path / "gauges.txt").write_text("sglang:spec_accept_length 3.2\n")
    status, _, said = call(*words[:-1], str(tmp_path / "gauges.txt"), "--num-steps", "2")
    assert status == 2
    assert "acceptance is 3.2; allowed: at most 3 at the 2 steps of --num-steps" in said
    assert call("plan", *words[3:])[0] == 2
