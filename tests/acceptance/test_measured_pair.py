"""Acceptance of a pair on prompts is that of its rounds, in any batch, and prompts are read from files."""

import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate
from specsim.acceptance.measured_pair import digest, measure_pair, read_prompts, record_of
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.models.synthetic_pair import synthetic_pair

PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [11], [40, 3, 22]]
SAMPLING = SamplingParams(max_new_tokens=16, ignore_eos=True)
DOUBLE = EngineOptions(dtype=torch.float64)


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("config", [SpecConfig(1, 3, 4), SpecConfig(2, 2, 5)])
def test_a_pair_is_measured_as_it_generates(config, batch):
    pair = synthetic_pair("eagle3")
    found = measure_pair(pair, PROMPTS, config, SAMPLING, DOUBLE, batch)
    run = generate(pair, PROMPTS, config, SAMPLING, engine=DOUBLE)
    assert found.counts == record_of(run).counts
    assert found.accept_length == run.acceptance.accept_length
    assert found.rates == run.acceptance.accepted_by_position
    assert found.config == config
    assert found.interval.low <= found.accept_length <= found.interval.high
    assert (found.pair, found.temperature, len(found.prompts)) == (pair.name, 0.0, 16)


@pytest.mark.parametrize(
    ("config", "batch", "name"),
    [(SpecConfig.plain(), 4, "num_steps"), (SpecConfig(1, 3, 4), 0, "batch")],
)
def test_nothing_to_measure_is_refused(config, batch, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        measure_pair(synthetic_pair("eagle3"), PROMPTS, config, SAMPLING, DOUBLE, batch)


def test_equal_prompts_have_equal_digests():
    assert digest(PROMPTS, 16) == digest([tuple(prompt) for prompt in PROMPTS], 16)
    assert len({digest(PROMPTS, 16), digest(PROMPTS, 17), digest(PROMPTS[::-1], 16)}) == 3


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("p.txt", "one\n\ntwo words\r\n", ["one", "two words"]),
        ("p.jsonl", '"one"\n{"prompt": "two"}\n{"turns": ["three", "four"]}\n', ["one", "two", "three"]),
        ("p.jsonl", '[1, 2]\n{"prompt_ids": [3]}\n', [[1, 2], [3]]),
    ],
)
def test_prompts_are_read_by_line(tmp_path, name, text, prompts):
    (tmp_path / name).write_bytes(text.encode())
    assert read_prompts(tmp_path / name) == prompts


@pytest.mark.parametrize("text", ["", "\n", "{}", "3", '[1, "a"]', '"a"\n[1]', '{"prompt": ""}', "no JSON"])
def test_lines_that_are_no_prompts_are_refused(tmp_path, text):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(InputError, check=lambda error: error.name == "prompts"):
        read_prompts(tmp_path / "p.jsonl")
