"""Predictions of smaller settings from one recording equal runs of the reference."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import specsim
from specsim import SamplingParams, SpecConfig, generate
from specsim.acceptance.files import read_record
from specsim.acceptance.prediction import RECORDED, SETTINGS, predict, show
from specsim.acceptance.recording import record
from specsim.core.display import stdout_console
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.files import write_json
from specsim.models.synthetic_pair import synthetic_pair
from specsim.simulator.acceptance import walk

PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [11], [40, 3, 22]]
NEW_TOKENS, LARGE = 20, SpecConfig(3, 3, 10, draft_kv="ancestor")
SMALLER = [LARGE, SpecConfig(1, 3, 4), SpecConfig(1, 1, 2), *(SpecConfig(2, 2, size) for size in (4, 6))]


@cache
def recorded(new_tokens=NEW_TOKENS):
    return record(synthetic_pair("eagle3"), PROMPTS, LARGE, new_tokens - 1)


@pytest.mark.parametrize("config", SMALLER)
def test_every_round_of_a_smaller_setting_is_predicted(config):
    """Drafts of a node that attends to its ancestors do not depend on the other lanes."""
    config = replace(config, draft_kv="ancestor")
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = generate(
        synthetic_pair("eagle3"), PROMPTS, config, params, engine=EngineOptions(dtype=torch.float64)
    ).outputs
    texts, law = recorded().texts, recorded().acceptance(config)
    for output, text, by_position in zip(outputs, texts, law.counts, strict=True):
        assert output.token_ids == tuple(text[:NEW_TOKENS])
        assert (walk(by_position) + 1).tolist() == list(output.num_accepted_tokens_per_round)
    assert len(set(np.concatenate(law.counts))) > 1


def test_shares_are_those_of_the_first_draft():
    """The rate at depth 0 and rank 0 is that of a chain's first draft, from every position."""
    first = recorded().accepted(SpecConfig(1, 1, 2)).mean()
    assert recorded().shares()[0, 0] == first
    assert 0 < first < 1


def test_predictions_are_shown_with_runs(capsys):
    found = predict(synthetic_pair("eagle3"), PROMPTS, 12, [SpecConfig(1, 2, 3), SpecConfig(2, 2, 5)], LARGE)
    assert found.mean_error < 0.03
    show(found, stdout_console())
    printed = capsys.readouterr().out
    assert f"{found.rows[1].measured:.3f}" in printed
    assert f"Mean error {found.mean_error:.2%}" in printed
    assert found.shares[0][0] == recorded(12).shares()[0, 0]
    assert found.to_json()["rows"][0]["error"] == found.rows[0].predicted / found.rows[0].measured - 1


def test_plans_read_what_predictions_write(tmp_path):
    found = predict(synthetic_pair("eagle3"), PROMPTS, 12, [SpecConfig(1, 2, 3)], LARGE)
    write_json(tmp_path / "predict.json", found.to_json())
    assert read_record(tmp_path / "predict.json").shares == found.shares


def test_thirty_settings_lie_within_the_recorded_one():
    assert len(set(SETTINGS)) == 30
    assert all(config.topk <= RECORDED.topk and config.num_steps <= RECORDED.num_steps for config in SETTINGS)
    assert RECORDED not in SETTINGS


def test_impossible_recordings_are_refused():
    with pytest.raises(InputError, check=lambda error: error.name == "num_steps"):
        record(synthetic_pair("eagle3"), PROMPTS, SpecConfig.plain(), 8)
    with pytest.raises(InputError, check=lambda error: error.name == "prompt"):
        record(synthetic_pair("eagle3"), [[7] * 17], replace(LARGE, max_len=20), 1)
    with pytest.raises(InputError, match="positions is 14; allowed: at most 13"):
        record(synthetic_pair("eagle3"), [[7, 8, 9, 10]], replace(LARGE, max_len=20), 14)
    assert record(synthetic_pair("eagle3"), [[7, 8, 9, 10]], replace(LARGE, max_len=20), 13)
    with pytest.raises(InputError, check=lambda error: error.name == "positions"):
        record(synthetic_pair("eagle3"), PROMPTS, LARGE, 0)
    with pytest.raises(InputError, check=lambda error: error.name == "prompts"):
        record(synthetic_pair("eagle3"), [], LARGE, 4)


def test_impossible_predictions_are_refused():
    with pytest.raises(InputError, check=lambda error: error.name == "max_new_tokens"):
        predict(synthetic_pair("eagle3"), PROMPTS, 1, SMALLER, LARGE)
    with pytest.raises(InputError, check=lambda error: error.name == "settings"):
        predict(synthetic_pair("eagle3"), PROMPTS, 12, [], LARGE)
    with pytest.raises(InputError, match="max_new_tokens is 9999; allowed: at most 14,"):
        predict(synthetic_pair("eagle3"), PROMPTS, 9999, SMALLER, replace(LARGE, max_len=20))


def test_one_text_is_one_prompt():
    found = predict(specsim.load(drafter="eagle"), "def main():", 4, [SpecConfig(1, 1, 2)], SpecConfig(1, 1, 2))
    assert found.num_prompts == 1
