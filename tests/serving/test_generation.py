"""The public entry: ends of requests, bad arguments, contents of a result."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specsim import InputError, SamplingParams, Scheduler, SpecConfig, generate, load, load_engine, make_request
from specsim.core.engine_options import EngineOptions
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import late_schedule, output_of, run_together
from specsim.serving.requests import make_requests

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3]
TREE = SpecConfig(topk=4, num_steps=4, num_draft_tokens=12, page_size=4)
PAIR = synthetic_pair("eagle3")


def run(prompts=PROMPTS, config=TREE, sampling=None, pair=PAIR, **changes):
    sampling = SamplingParams(**changes) if sampling is None else sampling
    return generate(pair, prompts, config, sampling, engine=EngineOptions(dtype=torch.float64))


def with_eos(*token_ids):
    return replace(PAIR, target=replace(PAIR.target, config=replace(PAIR.target.config, eos_token_ids=token_ids)))


LONG = run(max_new_tokens=40).outputs


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 17])
def test_output_is_cut_at_max_new_tokens_inside_a_path(max_new_tokens):
    for output, long in zip(run(max_new_tokens=max_new_tokens).outputs, LONG, strict=True):
        assert output.token_ids == long.token_ids[:max_new_tokens]
        assert output.logprobs == long.logprobs[:max_new_tokens]
        assert output.finish_reason == "length"


def test_rounds_of_a_result_are_a_table():
    result = run(max_new_tokens=17)
    table = result.to_pandas()
    for index, output in enumerate(result.outputs):
        own = table[table.output == index]
        assert tuple(own.num_accepted_tokens) == output.num_accepted_tokens_per_round
        assert (own.num_accepted_drafts == own.num_accepted_tokens - 1).all()
        assert list(own.first_token) == [1, *own.num_accepted_tokens.cumsum()[:-1] + 1]
    assert len(run(max_new_tokens=1).to_pandas()) == 0


def test_one_new_token_needs_no_round():
    assert all(output.num_accepted_tokens_per_round == () for output in run(max_new_tokens=1).outputs)


@pytest.mark.parametrize("position", [0, 1, 2, 3, 7, 12])
@pytest.mark.parametrize("by", ["eos", "stop token"])
def test_nothing_follows_the_first_token_that_stops(position, by):
    """The stop token is kept, wherever it is in an accepted path.

    Other requests continue.
    """
    stop = LONG[0].token_ids[position]
    eos = by == "eos"
    pair = with_eos(stop) if eos else PAIR
    result = run(pair=pair, max_new_tokens=40, stop_token_ids=() if eos else (stop,))
    for output, long in zip(result.outputs, LONG, strict=True):
        stops = stop in long.token_ids
        cut = long.token_ids.index(stop) + 1 if stops else 40
        assert output.token_ids == long.token_ids[:cut]
        assert output.finish_reason == ("stop" if stops else "length")


def test_a_stop_token_at_the_length_cap_is_a_stop():
    first = LONG[0].token_ids
    cap = first.index(first[5]) + 1
    output = run(PROMPTS[:1], max_new_tokens=cap, stop_token_ids=(first[5],)).outputs[0]
    assert (output.token_ids, output.finish_reason) == (first[:cap], "stop")


def test_ignore_eos_runs_to_the_cap():
    output = run(PROMPTS[:1], pair=with_eos(LONG[0].token_ids[3]), max_new_tokens=40, ignore_eos=True).outputs[0]
    assert output == LONG[0]


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("max_len", [12, 13, 16, 20])
@pytest.mark.parametrize("release", ["finish", "round"])
def test_a_request_stops_exactly_at_max_len(max_len, page_size, release):
    config = replace(TREE, max_len=max_len, page_size=page_size, release=release)
    for prompt, output, long in zip(PROMPTS, run(config=config).outputs, LONG, strict=True):
        assert len(prompt) + len(output.token_ids) == max_len
        assert output.token_ids == long.token_ids[: len(output.token_ids)]
        assert output.finish_reason == "length"


def test_the_targets_own_limit_is_the_default():
    config = replace(PAIR.target.config, max_position_embeddings=24)
    pair = replace(PAIR, target=replace(PAIR.target, config=config))
    assert [len(p) + len(o.token_ids) for p, o in zip(PROMPTS, run(pair=pair).outputs, strict=True)] == [24] * 3


def test_every_request_has_its_own_sampling():
    params = [
        SamplingParams(max_new_tokens=6),
        SamplingParams(temperature=1.0, max_new_tokens=9),
        SamplingParams(max_new_tokens=2),
    ]
    outputs = run(sampling=params).outputs
    assert [len(output.token_ids) for output in outputs] == [6, 9, 2]
    assert outputs[0].token_ids == LONG[0].token_ids[:6]


def test_seeds_change_sampled_text_and_repeat_it():
    texts = [run(temperature=1.0, seed=seed).outputs for seed in (0, 0, 1, 2**64 - 1)]
    assert texts[0] == texts[1]
    assert len({text[0].token_ids for text in texts}) == 3


def test_logprobs_are_those_of_plain_decoding():
    plain = run(config=SpecConfig.plain(), max_new_tokens=40).outputs
    for output, expected in zip(LONG, plain, strict=True):
        assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-6)


def test_a_pair_without_a_drafter_decodes_plainly():
    result = run(config=None, pair=replace(PAIR, drafter=None), max_new_tokens=40)
    assert [output.token_ids for output in result.outputs] == [output.token_ids for output in LONG]
    assert result.metrics["accept_length"] == 1


def test_metrics_are_those_of_the_rounds():
    result = run(max_new_tokens=40)
    counts = [count for output in result.outputs for count in output.num_accepted_tokens_per_round]
    metrics = result.metrics
    assert metrics["rounds"] == len(counts)
    assert metrics["accept_length"] == pytest.approx(sum(counts) / len(counts))
    assert metrics["accept_rate"] == pytest.approx((sum(counts) / len(counts) - 1) / TREE.num_steps)
    assert metrics["node_rate"] == pytest.approx((sum(counts) / len(counts) - 1) / (TREE.num_draft_tokens - 1))
    assert metrics["accepted_by_position"][0] == pytest.approx(sum(count > 1 for count in counts) / len(counts))
    assert metrics["tokens"] == sum(len(output.token_ids) for output in result.outputs)


def test_no_prompts_no_outputs():
    assert run([]).outputs == ()


def test_results_survive_json():
    result = run(max_new_tokens=4)
    assert json.loads(json.dumps(result.to_json()))["outputs"][0]["token_ids"] == list(result.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"prompts": [[]]}, "prompt"),
        ({"prompts": [[1] * 512]}, "prompt"),
        ({"prompts": [[1, 48]]}, "prompt"),
        ({"prompts": [[1, -1]]}, "prompt"),
        ({"prompts": [[1, 2.5]]}, "prompts"),
        ({"prompts": [1, 2, 3]}, "prompts"),
        ({"prompts": [[True]]}, "prompts"),
        ({"prompts": b"text"}, "prompts"),
        ({"prompts": None}, "prompts"),
        ({"prompts": {"a": 1}}, "prompts"),
        ({"prompts": [{1, 2}]}, "prompts"),
        ({"prompts": [{1: 1}]}, "prompts"),
        ({"prompts": [bytearray(b"ab")]}, "prompts"),
        ({"prompts": torch.tensor([1, 2, 3])}, "prompts"),
        ({"prompts": np.array([1, 2, 3])}, "prompts"),
        ({"prompts": torch.tensor(3)}, "prompts"),
        ({"prompts": np.array(3)}, "prompts"),
        ({"prompts": [torch.tensor(3)]}, "prompts"),
        ({"prompts": [np.array(3)]}, "prompts"),
        ({"prompts": [[[1]]]}, "prompts"),
        ({"sampling": []}, "sampling"),
        ({"sampling": [None] * 3}, "sampling"),
        ({"config": {"topk": 1}}, "config"),
        ({"prompts": "text"}, "prompt"),
        ({"stop_token_ids": (99,)}, "stop_token_ids"),
        ({"logit_bias": {99: 1.0}}, "logit_bias"),
        ({"sampling": [SamplingParams()]}, "sampling"),
    ],
)
def test_bad_input_names_its_field(changes, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        run(**changes)


def test_request_ids_name_the_random_streams():
    warm = SamplingParams(temperature=1.0, max_new_tokens=12)
    together = generate(PAIR, PROMPTS, TREE, warm, engine=EngineOptions(dtype=torch.float64)).outputs
    alone = generate(PAIR, PROMPTS[1:2], TREE, warm, request_ids=[1], engine=EngineOptions(dtype=torch.float64)).outputs
    other = generate(PAIR, PROMPTS[1:2], TREE, warm, request_ids=[7], engine=EngineOptions(dtype=torch.float64)).outputs
    assert alone[0].token_ids == together[1].token_ids != other[0].token_ids


@pytest.mark.parametrize(
    "ids", [[0, 1], [0, 1, 1], [0, 1, -1], [0, 1, 2**32], [0, 1, 2.0], [0, 1, 2, 2], 0, [[0], [1], [2]], "012"]
)
def test_request_ids_are_different_integers_one_a_prompt(ids):
    with pytest.raises(InputError, check=lambda error: error.name == "request_ids"):
        generate(PAIR, PROMPTS, TREE, request_ids=ids)


@pytest.mark.parametrize(
    "prompts",
    [
        [np.array([5, 17])], [torch.tensor([5, 17])], [(5, 17)], [[np.int64(5), 17]],
        np.array([[5, 17], [3, 4]]), torch.tensor([[5, 17], [3, 4]]), ((5, 17), (3, 4)),
    ],
)  # fmt: skip
def test_prompts_come_in_any_sequence(prompts):
    expected = run([[5, 17], [3, 4]][: len(prompts)], max_new_tokens=5).outputs
    assert run(prompts, max_new_tokens=5).outputs == expected


def test_a_result_without_rounds_is_json_too():
    assert json.loads(json.dumps(run(max_new_tokens=1).to_json(), allow_nan=False))["metrics"]["accept_length"] is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=2**63 - 1, max_new_tokens=4),
        SamplingParams(temperature=1.0, repetition_penalty=1e-3, max_new_tokens=4),
        SamplingParams(temperature=1e-320, logit_bias={1: 2**63, 2: -1e308}, max_new_tokens=4),
    ],
)
def test_extreme_parameters_give_finite_logprobs(params):
    for output in run(sampling=params).outputs:
        assert all(map(math.isfinite, output.logprobs))


WRONG_TYPES = {
    "pair": [lambda: generate(None, PROMPTS), lambda: generate({}, PROMPTS), lambda: load_engine("tiny", TREE)],
    "config": [lambda: generate(PAIR, PROMPTS, "tree"), lambda: load_engine(PAIR, None)],
    "engine": [lambda: generate(PAIR, PROMPTS, TREE, engine="fast"), lambda: Scheduler(None)],
    "serving": [lambda: Scheduler(load_engine(PAIR, TREE), 4096)],
    "acceptance": [lambda: generate(PAIR, PROMPTS, TREE, acceptance=3)],
    "target_config": [lambda: make_request(None, None, 0, [1], SamplingParams())],
    "params": [lambda: make_request(PAIR.target.config, None, 0, [1], None)],
    "draft_fields": [lambda: load("tiny", draft_fields=["norm=1"])],
    "target": [lambda: generate("no such pair", PROMPTS), lambda: load(3)],
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_arguments_of_another_type_are_named(name):
    for call in WRONG_TYPES[name]:
        with pytest.raises(InputError, check=lambda error: error.name == name and "\n" not in str(error)):
            call()


def test_more_tokens_than_a_pool_has_slots():
    huge = synthetic_pair(max_position_embeddings=2**31 - 1)
    sampling = SamplingParams(max_new_tokens=2**31 - 8)
    with pytest.raises(InputError, check=lambda error: error.name == "max_new_tokens"):
        generate(huge, PROMPTS[:1], TREE, sampling)


def test_the_shipped_pair_is_loaded_by_its_name():
    sampling = SamplingParams(max_new_tokens=3)
    assert generate("tiny", "def", TREE, sampling).outputs == generate(load(), "def", TREE, sampling).outputs


def test_an_unknown_implementation_is_refused():
    with pytest.raises(InputError, check=lambda error: error.name == "impl"):
        generate(PAIR, PROMPTS, TREE, engine=EngineOptions("slow"))


def test_a_result_introduces_itself_in_a_line():
    text = repr(run(max_new_tokens=4))
    assert text.startswith("Generation(3 outputs, 12 tokens, ")
    assert "accept length" in text


@pytest.mark.parametrize(
    ("device", "release", "schedule"),
    [("cuda", "finish", "overlap"), ("cuda", "round", "sync"), ("cpu", "finish", "sync")],
)
def test_tokens_are_read_late_only_where_a_gpu_works(device, release, schedule):
    engine = SimpleNamespace(device=torch.device(device), config=SpecConfig(release=release))
    assert late_schedule(engine) == schedule


def test_tokens_that_are_read_late_are_the_same():
    pair = synthetic_pair()
    found = {}
    for schedule in ("sync", "overlap"):
        params = [SamplingParams(max_new_tokens=5 + number, temperature=number % 2) for number in range(3)]
        requests = make_requests(pair, [[5, 17, 3], [1, 2, 3, 4, 5], [30]], params, None, 64)
        engine = load_engine(pair, SpecConfig(max_len=64), EngineOptions(dtype=torch.float64))
        run_together(engine, requests, schedule=schedule)
        found[schedule] = [output_of(request) for request in requests]
    assert found["overlap"] == found["sync"]
