"""Acceptance records of our own results and of benchmarks; files that hold none."""

import json
from dataclasses import asdict, replace

import pytest

from specsim import SamplingParams, SpecConfig, generate
from specsim.acceptance.baseline import compare
from specsim.acceptance.files import FORMATS, read_record, read_records
from specsim.acceptance.interval import with_interval
from specsim.acceptance.measured_pair import record_of
from specsim.acceptance.settings import StudySetting, chain
from specsim.acceptance.study import Measurement, Study
from specsim.core.errors import InputError
from specsim.core.files import without_nan
from specsim.core.json_schema import schema_name
from specsim.core.metrics import acceptance
from specsim.core.token_drafter import NgramConfig
from specsim.models.synthetic_pair import synthetic_pair
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts

PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [11]]
BENCHMARK = {
    "duration": 10.0, "completed": 4, "total_input_tokens": 40, "total_output_tokens": 80, "output_throughput": 8.0,
    "request_throughput": 0.4, "total_token_throughput": 12.0,
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def made(value: dict, output: str | None = None) -> str:
        path = tmp_path / "value.json"
        name = {} if output is None else {"schema": schema_name(output)}
        path.write_text(json.dumps(without_nan(name | value)))
        return str(path)

    return made


@pytest.fixture(scope="module")
def generation():
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    return generate(synthetic_pair("eagle3"), PROMPTS, SpecConfig(1, 2, 3), sampling)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"interval": None, "pair": "", "temperature": None},
        {"counts": (), "is_by_request": False, "topk": None, "num_draft_tokens": None},
        {"shares": ((0.5, 0.2), (0.4, 0.1)), "reported_length": 1.5, "reported_rounding": 0.005, "proposed_drafts": 9},
    ],
)
def test_a_record_is_read_as_it_was_written(write, generation, changes):
    record = replace(record_of(generation), **changes)
    path = write(record.to_json(), "acceptance")
    assert read_record(path) == replace(record, source=path)


def test_rounds_of_generate_are_counted_by_request(write, generation):
    path = write({"pair": "a pair"} | generation.to_json(), "generate")
    found = read_record(path)
    assert found.counts == record_of(generation).counts
    assert found.accept_length == generation.acceptance.accept_length
    assert found.rates == generation.acceptance.accepted_by_position
    assert (found.pair, found.temperature, found.config) == ("a pair", 0.0, SpecConfig(1, 2, 3))


def test_rounds_of_a_token_drafter_say_what_it_proposed(write):
    pair = synthetic_pair("eagle3").with_drafter(NgramConfig())
    generation = generate(pair, [[5, 6, 5, 6, 5]], SpecConfig(1, 3, 4), SamplingParams(max_new_tokens=16))
    found = read_record(write({"pair": "a pair"} | generation.to_json(), "generate"))
    depths = generation.outputs[0].proposed_depth_per_round
    drafted = sum(depth >= 1 for depth in depths)
    assert found.total.reached[0] == found.rounds == drafted < len(depths) == drafted + found.total.undrafted
    assert found.accept_length == generation.acceptance.accept_length


def test_earlier_records_that_count_rounds_without_drafts(write):
    counts = (Counts(10, 12, (6, 6), (7, 6)),)
    earlier = AcceptanceRecord("a file", "a tool", "as it counts.", 2.2, 1, 2, 3, counts, rates=(0.6, 0.6))
    found = read_record(write(earlier.to_json(), "acceptance"))
    assert (found.rounds, found.total.undrafted, found.accept_length) == (7, 3, 1 + 12 / 7)
    counters = AcceptanceRecord.of_counts([Counts(7, 12, (6, 6))], "a page", "vllm", "as it counts.", topk=1)
    assert compare(found, counters).ratio == 1


def test_served_requests_are_read(write, generation):
    value = {"pair": "a pair", "config": asdict(generation.config)}
    outputs = [{"num_accepted_tokens_per_round": [3, 1]}, {"num_accepted_tokens_per_round": [2]}]
    served = read_record(write(value | {"outputs": outputs}, "run"))
    assert served.counts == (Counts.of_rounds([2, 0], 2), Counts.of_rounds([1], 2))
    modes = {"pair": "a pair", "modes": [value | {"outputs": outputs}, value | {"outputs": []}]}
    assert read_record(write(modes, "run-compare")).counts == served.counts


def test_a_study_has_a_record_per_setting(write):
    figures = acceptance([3, 0, 1], 3, 4), acceptance([1, 1], 1, 2)
    rows = tuple(
        Measurement(StudySetting("eagle3", chain(steps), temperature), each, each, None)
        for steps, temperature, each in ((3, 0.0, figures[0]), (1, 1.0, figures[1]))
    )
    path = write(Study(2, 1, 64, rows, ()).to_json(), "accept")
    first, second = read_records(path)
    assert (first.accept_length, first.rates, first.rounds) == (figures[0].accept_length, (2 / 3, 1 / 3, 1 / 3), 3)
    assert (second.pair, second.temperature, second.num_steps) == ("eagle3", 1.0, 1)
    assert read_record(f"{path}#2") == second
    for place in (path, f"{path}#3", f"{path}#0"):
        with pytest.raises(InputError, check=lambda error: error.name == "acceptance"):
            read_record(place)


def test_shares_are_those_of_a_chain_of_best_drafts(write):
    shares = ((0.8, 0.1), (0.5, 0.2))
    for output in (None, "predict"):
        found = read_record(write({"shares": shares}, output))
        assert (found.shares, found.rates, found.accept_length) == (shares, (0.8, 0.4), pytest.approx(2.2))
        assert (found.topk, found.num_steps, found.num_draft_tokens) == (1, 2, 3)


def test_a_benchmark_gives_its_counts(write):
    counts = {"spec_decode_num_drafts": 40, "spec_decode_draft_tokens": 80, "spec_decode_accepted_tokens": 50}
    rates = {"spec_decode_per_position_acceptance_rates": [0.75, 0.5], "spec_decode_acceptance_length": 2.25}
    found = read_record(write(BENCHMARK | counts | rates))
    assert found.counts == (Counts(40, 50, (30, 20)),)
    assert (found.tool, found.accept_length, found.num_steps) == ("vllm", 2.25, 2)
    alone = read_record(write(BENCHMARK | counts | {"spec_decode_acceptance_length": 2.25}))
    assert (alone.rates, alone.num_steps, alone.rounds) == ((), 2, 40)
    sglang = read_record(write(BENCHMARK | {"mean_e2e_latency_ms": 3.0, "accept_length": 2.5}))
    assert (sglang.tool, sglang.accept_length, sglang.rounds) == ("sglang", 2.5, None)


def test_a_printed_benchmark_is_read(tmp_path):
    lines = ["============ Serving Benchmark Result ============", "Successful requests:  4"]
    lines += ["Request throughput (req/s):  0.40", "Acceptance length:  2.25", "Drafts:  40"]
    lines += ["Accepted tokens:  50", "Position 0:  75.00", "Position 1:  50.00", "=" * 50]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines) + "\n")
    assert read_record(path).counts == (Counts(40, 50, (30, 20)),)


@pytest.mark.parametrize(
    "text",
    ["", "hello", "{}", "[1, 2]", json.dumps(BENCHMARK), '{"schema": "specsim/plan/1"}', '{"schema": "specsim/run/1"}'],
)
def test_a_file_without_acceptance_names_the_formats(tmp_path, text):
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(
        InputError, check=lambda error: (error.name, error.value) == ("acceptance", str(path))
    ) as raised:
        read_record(path)
    assert "run/1" in text or FORMATS in str(raised.value)
    for tool in ("vLLM", "SGLang", "AIPerf", "specsim"):
        assert tool in FORMATS or tool == "specsim"


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        (("counts",), ["x"], "counts"),
        (("counts", 0, "rounds"), 2.5, "rounds"),
        (("interval", "low"), "x", "low"),
        (("positions",), [{"unconditional": 0.5}], "rates"),
        (("setting", "num_steps"), 2**63, "num_steps"),
        (("setting", "topk"), 10**12, "topk"),
        (("tool",), ["x"], "tool"),
        (("reported_rounding",), None, "reported_rounding"),
    ],
)
def test_a_bad_value_of_a_record_is_named_with_its_file(tmp_path, path, value, name):
    record = with_interval(AcceptanceRecord.of_counts([Counts.of_rounds([1, 0], 2)] * 3, "a", "b", "c."))
    written = {"schema": "specsim/acceptance/1"} | record.to_json()
    place = written
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "record.json"
    file.write_text(json.dumps(written))
    with pytest.raises(InputError, check=lambda error: error.name == name and str(file) in str(error)):
        read_record(file)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(InputError, check=lambda error: error.name == "baseline"):
        read_record(tmp_path / "nothing", "baseline")


def test_an_interval_is_not_computed_twice():
    record = AcceptanceRecord.of_counts([Counts.of_rounds([1, 0], 1)] * 3, "a", "b", "c.", is_by_request=True)
    assert with_interval(with_interval(record)) is not record
    assert with_interval(known := with_interval(record)) is known


LLAMACPP = (
    "0.06 I slot print_timing: id  0 | task {task} | draft acceptance = {rate:.5f} ({accepted:5d} accepted /   240 "
    "generated), mean acceptance length = {length:5.2f}, acceptance rate per position = ({rates})\n"
    "0.06 I statistics     draft-eagle3: #gen drafts =     80, #gen tokens =    240, #acc tokens =   150\n"
)
PROFILE = {
    "method": "eagle3", "num_speculative_tokens": 3, "marginal_accept_rates": [0.74, 0.5, 0.32],
    "mean_accept_length": 2.56, "acceptance_length_histogram": {"1": 26, "2": 24, "3": 18, "4": 32},
}  # fmt: skip
TENSORRT_LLM = {
    "choices": [
        {
            "speculative_decoding": {
                "acceptance_rate": 0.5, "total_accepted_draft_tokens": 30, "total_draft_tokens": 60,
                "num_spec_steps": 20, "acceptance_histogram": [8, 0, 6, 6], "num_spec_tokens": 3,
            }
        }
    ]
}  # fmt: skip


def llamacpp(**wrong) -> str:
    one = {"task": 3, "rate": 0.625, "accepted": 150, "length": 2.875, "rates": "0.800, 0.625, 0.450"}
    two = {"task": 4, "rate": 0.5, "accepted": 120, "length": 2.5, "rates": "0.800, 0.500, 0.200"}
    return LLAMACPP.format(**one | wrong) + LLAMACPP.format(**two)


@pytest.mark.parametrize(
    ("text", "tool", "counts", "proposed"),
    [
        (llamacpp(), "llama.cpp", (Counts(80, 150, (64, 50, 36)), Counts(80, 120, (64, 40, 16))), 480),
        (json.dumps(PROFILE), "model-optimizer", (Counts(100, 156, (74, 50, 32)),), None),
        (json.dumps(TENSORRT_LLM), "tensorrt-llm", (Counts(20, 30, (12, 12, 6)),), 60),
    ],
)
def test_counts_of_other_tools(text, tool, counts, proposed, tmp_path):
    path = tmp_path / "metrics"
    path.write_text(text)
    found = read_record(path)
    assert (found.tool, found.counts, found.proposed_drafts) == (tool, counts, proposed)
    assert (found.num_steps, found.is_chain) == (3, True)


@pytest.mark.parametrize(
    "text",
    [
        llamacpp(rate=0.7),
        llamacpp(length=2.5),
        json.dumps(PROFILE | {"mean_accept_length": 1.56}),
        json.dumps(PROFILE | {"marginal_accept_rates": [0.74, 0.5, 0.52]}),
        json.dumps(TENSORRT_LLM).replace('"total_draft_tokens": 60', '"total_draft_tokens": 90'),
    ],
)
def test_figures_of_other_tools_have_to_agree(text, tmp_path):
    path = tmp_path / "metrics"
    path.write_text(text)
    with pytest.raises(InputError, match="figures that agree"):
        read_record(path)
