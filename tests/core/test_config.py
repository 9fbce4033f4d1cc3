import math
import pickle
from copy import deepcopy
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.core.config import SamplingParams, SpecConfig, ceil_to
from specsim.core.errors import InputError

BAD_SPECS = [
    ("topk", dict(topk=0), "at least 1"),
    ("topk", dict(topk=True), "at least 1"),
    ("topk", dict(topk=2.0), "at least 1"),
    ("topk", dict(topk=2, num_steps=0, num_draft_tokens=1), "plain decoding"),
    ("num_steps", dict(num_steps=-1), "from 0 to 1024"),
    ("num_steps", dict(num_steps=1025), "from 0 to 1024"),
    ("num_draft_tokens", dict(num_draft_tokens=1), "at least 2"),
    ("num_draft_tokens", dict(topk=1, num_steps=3, num_draft_tokens=5), "4"),
    ("num_draft_tokens", dict(topk=1, num_steps=3, num_draft_tokens=3), "4"),
    ("num_draft_tokens", dict(topk=1, num_steps=0, num_draft_tokens=2), "1"),
    ("num_draft_tokens", dict(topk=2, num_steps=1, num_draft_tokens=4), "2 to 3"),
    ("num_draft_tokens", dict(topk=3, num_steps=3, num_draft_tokens=23), "2 to 22"),
    ("page_size", dict(page_size=0), "from 1"),
    ("page_size", dict(page_size="16"), "from 1"),
    ("page_size", dict(page_size=2**16 + 1), "from 1 to 65536"),
    ("draft_kv", dict(draft_kv="path"), "lane or ancestor"),
    ("extend", dict(extend="padded"), "fixed or ragged"),
    ("release", dict(release="never"), "finish or round"),
    ("score", dict(score="logit"), "prob or logprob"),
    ("penalties", dict(penalties=None), "exact or relaxed"),
    ("threshold_single", dict(threshold_single=1.5), "from 0 to 1"),
    ("threshold_single", dict(threshold_single=math.nan), "from 0 to 1"),
    ("threshold_acc", dict(threshold_acc=-0.1), "from 0 to 1"),
    ("threshold_acc", dict(threshold_acc=True), "from 0 to 1"),
    ("typical_epsilon", dict(typical_epsilon=1.5), "from 0 to 1"),
    ("typical_delta", dict(typical_delta=-1), "from 0 to 1"),
    ("verifier", dict(verifier="greedy"), "target_only or typical or rejection"),
    ("topk", dict(verifier="rejection", topk=4), "1: verifier rejection verifies a chain"),
    ("topk", dict(verifier="block", topk=2), "1: verifier block verifies a chain"),
    ("topk", dict(verifier="gumbel", topk=2), "1: verifier gumbel verifies a chain"),
    ("num_draft_tokens", dict(verifier="rejection", topk=1, num_draft_tokens=8), "4"),
    ("num_draft_tokens", dict(verifier="multi_round", num_draft_tokens=8), "13: verifier multi_round"),
    ("num_draft_tokens", dict(verifier="multi_round", topk=1, num_draft_tokens=5), "4: verifier multi_round"),
    ("verifier", dict(verifier="block", topk=1, num_steps=0, num_draft_tokens=1), "when num_steps is 0"),
    ("threshold_acc", dict(verifier="typical", threshold_acc=0.5), "1, unless the verifier is target_only"),
    (
        "threshold_single",
        dict(verifier="block", topk=1, num_draft_tokens=4, threshold_single=0.5),
        "unless the verifier",
    ),
    ("max_len", dict(max_len=1), "from 2 to 2^31 - 1"),
    ("max_len", dict(max_len=64.0), "from 2 to 2^31 - 1"),
]

BAD_PARAMS = [
    ("temperature", -0.1, "at least 0"),
    ("temperature", math.inf, "at least 0"),
    ("temperature", math.nan, "at least 0"),
    ("temperature", "0", "at least 0"),
    ("top_k", -1, "at least 0"),
    ("top_k", 5.0, "at least 0"),
    ("top_p", 0.0, "above 0"),
    ("top_p", 1.01, "at most 1"),
    ("min_p", -0.01, "from 0 to 1"),
    ("min_p", 1.01, "from 0 to 1"),
    ("repetition_penalty", 0.0, "a number from 0.001 to 1000"),
    ("presence_penalty", 2.5, "from -2 to 2"),
    ("frequency_penalty", -2.5, "from -2 to 2"),
    ("max_new_tokens", 0, "from 1 to 2^31 - 1"),
    ("max_new_tokens", 10**18, "from 1 to 2^31 - 1"),
    ("ignore_eos", "no", "True or False"),
    ("ignore_eos", None, "True or False"),
    ("seed", -1, "from 0 to 2^64 - 1"),
    ("seed", 2**64, "from 0 to 2^64 - 1"),
    ("seed", 1.0, "from 0 to 2^64 - 1"),
    ("stop", "end", "each entry a text"),
    ("stop", ("end", ""), "of at least one character"),
    ("stop", (7,), "each entry a text"),
    ("stop_regex", ("a", ""), "of at least one character"),
    ("stop_regex", "(", "each entry a text"),
    ("stop_regex", ("a", "("), "patterns that Python's re compiles"),
]


@st.composite
def spec_configs(draw):
    topk, num_steps = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    pool = topk + (num_steps - 1) * topk**2
    num_draft_tokens = num_steps + 1 if topk == 1 else draw(st.integers(2, pool + 1))
    page_size = draw(st.sampled_from([1, 2, 3, 4, 7, 16]))
    return SpecConfig(topk, num_steps, num_draft_tokens, page_size)


def assert_names(error: InputError, name: str, value: object, allowed: str):
    assert error.name == name
    assert repr(error.value) == repr(value)  # nan too
    assert str(error).startswith(f"{name} is {value!r};")
    assert allowed in error.allowed
    assert error.allowed in str(error)


@pytest.mark.parametrize(
    ("setting", "nodes"),
    [
        (dict(), 8),
        (dict(topk=1), 4),
        (dict(topk=1, num_steps=0), 1),
        (dict(topk=1, num_steps=9, verifier="block"), 10),
        (dict(topk=2, num_steps=1), 3),  # all that there is
        (dict(topk=4, num_steps=12), 13),  # a path to the last step
        (dict(topk=3, num_steps=4, verifier="multi_round"), 13),
        (dict(num_draft_tokens=None), 8),
    ],
)
def test_number_of_nodes_follows_where_it_is_not_given(setting, nodes):
    assert SpecConfig(**setting).num_draft_tokens == nodes


@pytest.mark.parametrize(("name", "setting", "allowed"), BAD_SPECS)
def test_bad_spec_config_names_field_value_and_what_is_allowed(name, setting, allowed):
    with pytest.raises(InputError) as caught:
        SpecConfig(**setting)
    assert_names(caught.value, name, setting.get(name, SpecConfig.num_draft_tokens), allowed)


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_PARAMS)
def test_bad_sampling_params_name_field_value_and_allowed_values(name, value, allowed):
    with pytest.raises(InputError) as caught:
        SamplingParams(**{name: value})
    assert_names(caught.value, name, value, allowed)


def test_every_checked_field_has_a_bad_case():
    assert {name for name, _, _ in BAD_SPECS} == {field.name for field in fields(SpecConfig)}
    unchecked = {"logit_bias", "stop_token_ids"}
    assert {name for name, _, _ in BAD_PARAMS} == {field.name for field in fields(SamplingParams)} - unchecked


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("logit_bias", {3: bias}) for bias in (math.inf, -math.inf, math.nan)),
        ("logit_bias", [3]),
        ("temperature", 10**400),
    ],
)
def test_numbers_that_are_not_finite_are_refused(name, value):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=0),
        dict(top_p=math.ulp(0)),
        dict(top_p=1),
        dict(min_p=1),
        dict(presence_penalty=-2, frequency_penalty=2),
        dict(seed=2**64 - 1),
        dict(max_new_tokens=1),
    ],
)
def test_ends_of_the_allowed_ranges_are_allowed(params):
    made = SamplingParams(**params)
    assert {name: getattr(made, name) for name in params} == params


@pytest.mark.parametrize("value", [SpecConfig(), SamplingParams()])
def test_values_are_frozen(value):
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(value)[0].name, 1)


def test_params_with_biases_are_values():
    given = {3: 1.5, 7: -2.0}
    params = SamplingParams(logit_bias=given)
    given[3] = math.nan
    with pytest.raises(TypeError):
        params.logit_bias[3] = math.nan
    assert dict(params.logit_bias) == params.logit_bias == {3: 1.5, 7: -2.0}
    same = SamplingParams(logit_bias={7: -2.0, 3: 1.5})
    assert {params} == {same, replace(params), deepcopy(params), pickle.loads(pickle.dumps(params))}
    assert params != SamplingParams(logit_bias={3: 1.5})
    assert eval(repr(params)) == params


def test_plain_is_a_round_whose_tree_is_its_root():
    plain = SpecConfig.plain(page_size=4, max_len=9)
    assert (plain.topk, plain.num_steps, plain.num_draft_tokens) == (1, 0, 1)
    assert (plain.page_size, plain.max_len, plain.is_plain) == (4, 9, True)
    assert (plain.num_candidates, plain.need) == (0, 1)
    assert not SpecConfig().is_plain


@given(spec_configs())
def test_candidates_are_k_children_of_the_root_and_of_each_lane(config):
    of_each_step = [config.topk] + [config.topk * config.topk] * (config.num_steps - 1)
    assert config.num_candidates == sum(of_each_step)


@pytest.mark.parametrize(
    ("setting", "need"),
    [
        ((8, 5, 64, 4), 64),  # the lanes of the layout's worked example: 2 pages of 4 for each of 8 lanes
        ((4, 3, 8, 16), 128),  # 15 + 3 columns are 2 pages a lane
        ((4, 2, 8, 1), 8),
        ((4, 3, 8, 1), 12),
        ((2, 2, 7, 1), 7),
        ((1, 5, 6, 16), 6),
        ((2, 1, 3, 16), 32),
        ((2, 2, 7, 2), 8),
        ((3, 2, 11, 2), 12),
        ((2, 3, 11, 2), 11),
    ],
)
def test_need_by_hand(setting, need):
    assert SpecConfig(*setting).need == need


def columns_touched(config: SpecConfig, seq_len: int) -> int:
    """Count one past the last column of a round's lanes and of its tree, slot by slot."""
    shared = config.page_size == 1 or config.topk == 1
    last = 0 if shared else seq_len % config.page_size
    column = seq_len - last
    for _ in range(config.topk):
        column += last + config.num_steps
        while not shared and column % config.page_size:
            column += 1
    return max(column, seq_len + config.num_draft_tokens)


@given(spec_configs())
def test_need_covers_every_length_within_a_page(config):
    touched = [columns_touched(config, length) - length for length in range(3 * config.page_size)]
    assert max(touched) <= config.need < max(touched) + config.page_size


@given(spec_configs(), st.integers(1, 100))
def test_reserved_columns_are_the_fewest_pages_for_two_rounds(config, seq_len):
    reserved = config.reserved_columns(seq_len)
    assert reserved % config.page_size == 0
    assert 0 <= reserved - (seq_len + 2 * config.need) < config.page_size


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_ceil_to_is_the_smallest_multiple_at_or_above(value, multiple):
    assert ceil_to(value, multiple) == next(n for n in range(value, value + multiple) if n % multiple == 0)


def test_naive_eagle_is_one_draft_in_pages_of_one_slot():
    preset = SpecConfig.preset("naive-eagle")
    assert (preset.topk, preset.num_steps, preset.num_draft_tokens, preset.page_size) == (1, 1, 2, 1)
    more = SpecConfig.preset("naive-eagle", num_steps=3, page_size=16, verifier="block")
    assert more == SpecConfig(1, 3, 4, 16, verifier="block")
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("preset", "medusa")):
        SpecConfig.preset("medusa")


def test_an_input_error_crosses_processes():
    error = pickle.loads(pickle.dumps(InputError("topk", 0, "at least 1")))
    assert str(error) == "topk is 0; allowed: at least 1"
    assert (error.name, error.value, error.allowed) == ("topk", 0, "at least 1")


@pytest.mark.parametrize("verifier", ["multi_round", "traversal", "recursive"])
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 1), (1, 4), (3, 1), (2, 3)])
def test_a_static_tree_has_a_lane_of_every_child_of_the_root(topk, num_steps, verifier):
    config = SpecConfig(topk, num_steps, 1 + topk * num_steps, verifier=verifier)
    assert (config.num_candidates, config.num_parents) == (topk * num_steps, 1 + topk * (num_steps - 1))
    assert config.is_sampled
    assert config.has_draft_prob


def test_gumbel_reads_noise_and_no_draft_distribution():
    for steps in (0, 3):
        config = SpecConfig(1, steps, steps + 1, verifier="gumbel")
        assert (config.is_sampled, config.has_draft_prob) == (True, False)


def test_only_typical_and_lower_thresholds_are_not_lossless():
    sampled = dict.fromkeys(("rejection", "block", "gumbel", "multi_round", "traversal", "recursive"), True)
    for verifier, is_lossless in ({"target_only": True, "typical": False} | sampled).items():
        assert SpecConfig(1, 3, 4, verifier=verifier).is_lossless == is_lossless
    for name in ("threshold_single", "threshold_acc"):
        assert not SpecConfig(**{name: 0.9}).is_lossless


@pytest.mark.parametrize("verifier", ["target_only", "typical"])
def test_the_best_drafts_are_not_sampled(verifier):
    assert not SpecConfig(verifier=verifier).is_sampled
