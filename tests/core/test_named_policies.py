"""Policies by name, from objects of every kind, and from files that engines read."""

import json

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.core.policies.fields import FIELDS, RULE_FIELDS, TABLE
from specsim.core.policies.moving_average import AverageRule
from specsim.core.policies.named import MAKERS, REQUEST_MAKERS, default_steps, named_policy, policy_value

TREE = SpecConfig(topk=2, num_steps=5, num_draft_tokens=8)
COST = {"batch_sizes": [1, 8], "seconds": {"0": [1, 2], "3": [1.2, 4]}}
SGLANG = {"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [0, 1]}, "ema_alpha": 0.5, "strategy": "ema"}
VLLM = {"method": "eagle", "num_speculative_tokens": 5, TABLE: [[1, 4, 5], [5, 9, 0]]}


@pytest.mark.parametrize(
    ("value", "name", "steps"),
    [
        ("moving-average", "moving-average", [0, 1, 3, 5]),
        ("throughput", "throughput", [0, 1, 3, 5]),
        ({"policy": "throughput", "steps": [0, 2]}, "throughput", [0, 2]),
        ({"policy": "table", TABLE: [[1, 4, 5], [5, 9, 0]]}, "table", [0, 5]),
        ({"policy": "goodput", **COST}, "goodput", [0, 3]),
        ({"policy": "scripted", "script": [3, 0, 3]}, "scripted", [0, 3]),
        ({"policy": "off-switch", "limit": 4}, "off-switch", [0, 1, 3, 5]),
        (SGLANG, "moving-average", [0, 1, 3]),
        (VLLM, "table", [0, 5]),
    ],
    ids=str,
)
def test_policies_are_read_with_their_settings(value, name, steps):
    policy = named_policy(value, TREE)
    assert policy.name == name
    assert [config.num_steps for config in policy.settings] == steps
    assert 0 <= policy.make().choose(np.full(3, 10)) < len(steps)
    again = named_policy(json.loads(json.dumps(policy.to_json())), TREE)
    assert again == policy


def test_trees_are_named_one_by_one():
    trees = [{"topk": 3, "num_steps": 2, "num_draft_tokens": 9}, {"num_steps": 3}, {"num_steps": 0}]
    policy = named_policy({"policy": "scripted", "settings": trees, "script": [2, 3]}, TREE)
    assert [(each.topk, each.num_draft_tokens) for each in policy.settings] == [(3, 9), (1, 4), (1, 1)]


def test_default_steps_double():
    assert [default_steps(most) for most in (0, 1, 2, 5, 7, 9)] == [
        (0,),
        (0, 1),
        (0, 1, 2),
        (0, 1, 3, 5),
        (0, 1, 3, 7),
        (0, 1, 3, 7, 9),
    ]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("goodput", "adaptive"),
        ("fastest", "adaptive"),
        ({"policy": ["table"]}, "adaptive"),
        ({"policy": "table"}, "adaptive"),
        ({"policy": "table", TABLE: 3}, "adaptive"),
        ({"policy": "throughput", "speed": 1}, "adaptive"),
        ({"policy": "moving-average", "rules": {"a": 3}}, "adaptive"),
        ({"policy": "goodput", "batch_sizes": [1], "seconds": {"0": [1], "3": ["a"]}}, "adaptive"),
        ({"policy": "goodput", "batch_sizes": [1]}, "adaptive"),
        ({"policy": "goodput", "batch_sizes": [1], "seconds": {"9" * 5000: [1.0]}}, "adaptive"),
        ({"policy": "scripted", "script": [1e308]}, "adaptive"),
        ({"policy": "scripted", "script": [3.0]}, "adaptive"),
        ({"1": {"candidate_steps": [1]}, "9" * 5000: {"candidate_steps": [1]}}, "adaptive"),
        ({"policy": "goodput", "batch_sizes": [1], "seconds": {"0": [1], "3": [0]}}, "seconds"),
        ({"policy": "scripted", "script": [3], "steps": [0, 1]}, "num_steps"),
        ({"policy": "scripted", "script": [3], "steps": [3], "settings": [{"num_steps": 3}]}, "steps"),
        ({"1": 3}, "adaptive"),
        ({"1": {"candidate_steps": [1]}, "strategy": "throughput_aware"}, "strategy"),
        ({"drafts": 3}, "adaptive"),
    ],
    ids=str,
)
def test_bad_policies_are_one_sentence(value, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        named_policy(value, TREE)


@pytest.mark.parametrize("text", ["fastest", "missing.json", "list.json"])
def test_files_have_an_object(text, tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(InputError, check=lambda error: error.name == "adaptive"):
        policy_value(str(tmp_path / text) if text.endswith("json") else text)


def test_fields_are_those_of_the_policies():
    assert {*MAKERS, "goodput"} == set(FIELDS)
    per_request = {name for name, fields in FIELDS.items() if "per_request" in fields}
    assert {*REQUEST_MAKERS, "goodput"} == per_request
    assert {"candidate_steps", *RULE_FIELDS} == set(AverageRule.__dataclass_fields__)


def test_a_policy_of_more_steps_than_the_setting_is_refused():
    value = {"policy": "scripted", "script": [1, 4]}
    assert max(config.num_steps for config in named_policy(value, SpecConfig(1, 4)).settings) == 4
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("num_steps", 3)):
        named_policy(value, SpecConfig(1, 3))
