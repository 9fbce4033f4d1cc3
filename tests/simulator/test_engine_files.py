"""Schedules by batch size, and the files that engines read."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from jsonschema import Draft202012Validator

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator.acceptance import Option
from specsim.simulator.candidates import candidates
from specsim.simulator.cell import Cell
from specsim.simulator.engine_files import FILES, check, schema, sglang_file, tensorrt_llm_file, text, vllm_file
from specsim.simulator.schedule import SWITCH, Range, SteadyBatch, _least_loss, schedule

CELL = Cell(max_running=100, hardware="H200")
CHAINS = [CELL.option(config) for config in candidates(CELL) if config.topk == 1]


def ranges(*found: tuple[int, int, int]) -> list[Range]:
    """Ranges of (low, high, steps)."""
    config = lambda steps: SpecConfig(1, steps, steps + 1) if steps else SpecConfig.plain()  # noqa: E731
    return [Range(low, high, config(steps), 1.0) for low, high, steps in found]


USUAL = ranges((1, 8, 5), (9, 64, 3), (65, 256, 0))


def test_a_schedule_covers_all_batch_sizes_once():
    found = schedule(CELL, CHAINS)
    assert (found[0].low, found[-1].high) == (1, 100)
    assert len(found) > 1
    for one, two in pairwise(found):
        assert two.low == one.high + 1
        assert two.config != one.config


def test_a_schedule_loses_little_at_every_batch_size():
    """It loses no more than a range more would cost; a setting for all sizes loses more somewhere."""
    plain = Option.plain()
    batches = {option: SteadyBatch.of(CELL.serving(option)) for option in CHAINS}
    assert plain in CHAINS
    losses: dict[str, list[float]] = {"schedule": [], "always 5": []}
    for each in schedule(CELL, CHAINS):
        speeds = {option.config: batches[option].tokens_per_s(option, each.high) for option in CHAINS}
        losses["schedule"].append(max(speeds.values()) / speeds[each.config] - 1)
        losses["always 5"].append(max(speeds.values()) / speeds[SpecConfig(1, 5, 6)] - 1)
        assert each.speedup == pytest.approx(speeds[each.config] / speeds[plain.config])
    assert max(losses["schedule"]) <= SWITCH * 1.02
    assert max(losses["always 5"]) > 2 * SWITCH


def test_a_change_has_to_save_what_it_costs():
    """The second setting is better at the third of five sizes only, by a little or by much."""
    losses = np.array([[0.0, 0.5]] * 5)
    for saved, expected in ((1.9 * SWITCH, [0, 0, 0, 0, 0]), (2.1 * SWITCH, [0, 0, 1, 0, 0])):
        losses[2] = (saved, 0.0)
        assert _least_loss(losses) == expected
    assert _least_loss(np.zeros((3, 2))) == [0, 0, 0]


def test_sglang_has_the_lowest_batch_sizes_of_ranges():
    expected = {"1": {"candidate_steps": [5]}, "9": {"candidate_steps": [3]}, "65": {"candidate_steps": [0]}}
    assert sglang_file(USUAL, "eagle3", "my/head") == expected


def test_vllm_has_both_ends_of_ranges():
    value = vllm_file(USUAL, "eagle3", "my/head")
    assert value["num_speculative_tokens_per_batch_size"] == [[1, 8, 5], [9, 64, 3], [65, 256, 0]]
    assert (value["method"], value["model"], value["num_speculative_tokens"]) == ("eagle3", "my/head", 5)
    assert "model" not in vllm_file(USUAL, "mtp", "my/head")


def test_tensorrt_llm_has_the_highest_batch_sizes_of_ranges():
    """Plain decoding at the end needs no key; the first range has the most drafts."""
    settings = tensorrt_llm_file(USUAL, "eagle3", "my/head")["speculative_config"]
    assert settings == {
        "decoding_type": "Eagle3",
        "max_draft_len": 5,
        "speculative_model": "my/head",
        "draft_len_schedule": {8: 5, 64: 3},
    }
    settings = tensorrt_llm_file(ranges((1, 2, 2), (3, 9, 4), (10, 20, 0), (21, 32, 1)), "mtp", "")[
        "speculative_config"
    ]
    assert settings["draft_len_schedule"] == {2: 2, 9: 2, 20: 0, 32: 1}
    assert (settings["max_draft_len"], settings["num_nextn_predict_layers"]) == (2, 2)


def test_a_batch_size_has_the_same_drafts_in_every_file():
    """Read as each engine documents its keys."""
    sglang = {int(low): value["candidate_steps"][0] for low, value in sglang_file(USUAL, "eagle", "d").items()}
    vllm = vllm_file(USUAL, "eagle", "d")["num_speculative_tokens_per_batch_size"]
    tensorrt = tensorrt_llm_file(USUAL, "eagle", "d")["speculative_config"]["draft_len_schedule"]
    for size in range(1, 257):
        (steps,) = (each.config.num_steps for each in USUAL if each.low <= size <= each.high)
        assert sglang[max(low for low in sglang if low <= size)] == steps
        assert [drafts for low, high, drafts in vllm if low <= size <= high] == [steps]
        assert tensorrt.get(min((high for high in tensorrt if high >= size), default=0), 0) == steps


@pytest.mark.parametrize("engine", FILES)
def test_files_of_real_schedules_are_as_documented(engine):
    Draft202012Validator.check_schema(schema(engine))
    value = FILES[engine](schedule(CELL, CHAINS), "eagle3", "my/head")
    written = text(value, Path("file.json"))
    Draft202012Validator(schema(engine)).validate(json.loads(written))
    assert yaml.safe_load(text(value, Path("file.yaml"))) == value


@pytest.mark.parametrize(
    ("engine", "change"),
    [
        ("sglang", {"1": {"candidate_steps": []}}),
        ("sglang", {"1": {"candidate_steps": [-1]}}),
        ("sglang", {"1": {"steps": [1]}}),
        ("sglang", {"1-8": {"candidate_steps": [1]}}),
        ("vllm", {"num_speculative_tokens_per_batch_size": []}),
        ("vllm", {"num_speculative_tokens_per_batch_size": [[1, 8]]}),
        ("vllm", {"num_speculative_tokens_per_batch_size": [[2, 8, 1]]}),
        ("vllm", {"num_speculative_tokens_per_batch_size": [[1, 8, 1], [8, 9, 1]]}),
        ("vllm", {"num_speculative_tokens_per_batch_size": [[1, 8, 1], [20, 9, 1]]}),
        ("vllm", {"num_speculative_tokens": 4}),
        ("vllm", {"num_speculative_tokens": 0}),
        ("vllm", {"method": "ngram"}),
        ("tensorrt_llm", {"speculative_config": {"decoding_type": "Eagle3"}}),
    ],
)
def test_a_file_against_the_documentation_is_refused(engine, change):
    value = FILES[engine](USUAL, "eagle3", "my/head")
    check(engine, value)
    with pytest.raises(InputError, check=lambda error: error.name == f"{engine}_file"):
        check(engine, value | change)


@pytest.mark.parametrize("change", [{"max_draft_len": 6}, {"draft_len_schedule": {8: 5, 9: 6}}, {"max_concurrency": 4}])
def test_tensorrt_llm_rules_between_fields_are_checked(change):
    value = tensorrt_llm_file(USUAL, "eagle3", "my/head")
    with pytest.raises(InputError, check=lambda error: error.name == "tensorrt_llm_file"):
        check("tensorrt_llm", {"speculative_config": value["speculative_config"] | change})


@pytest.mark.parametrize("engine", FILES)
def test_a_schedule_without_drafts_has_no_file(engine):
    with pytest.raises(InputError, check=lambda error: error.name == "num_steps"):
        FILES[engine](ranges((1, 256, 0)), "eagle3", "my/head")


def test_what_engines_cannot_say_is_refused():
    with pytest.raises(InputError, check=lambda error: error.name == "topk"):
        vllm_file([Range(1, 9, SpecConfig(2, 2, 4), 1.0)], "eagle3", "d")
    with pytest.raises(InputError, check=lambda error: error.name == "tensorrt_llm_file"):
        tensorrt_llm_file(ranges((1, 2, 0), (3, 9, 2)), "eagle3", "d")


@pytest.mark.parametrize("clients", [4, 64])
def test_the_simulated_server_agrees_with_the_schedule(clients):
    """The scheduled chain is within 3 % of the best chain of up to 6 steps."""
    cell = CELL.with_values(concurrency=clients, requests=max(48, 3 * clients))
    (steps,) = (each.config.num_steps for each in schedule(CELL, CHAINS) if each.low <= clients <= each.high)
    speeds = {}
    for option in CHAINS[:7]:
        metrics = cell.serving(option).run(option).metrics()
        speeds[option.config.num_steps] = metrics["Output Throughput (tok/s)"]
    assert max(speeds.values()) / speeds[steps] < 1.03
    assert max(speeds.values()) / speeds[0] > 1.2
