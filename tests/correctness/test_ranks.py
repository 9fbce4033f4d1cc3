"""Two ranks of the fast implementation: equal to the reference, to each other in every round, and to one rank."""

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specsim import EngineOptions, SamplingParams, SpecConfig, generate, load
from specsim.core.policies.policy import Choice
from specsim.correctness.differential import check
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.implementation import Shares
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.ranks import RankFailed, run_in_ranks
from specsim.models.load import Parts
from specsim.serving.adaptation import Adaptation

SMALL = dict(topk=2, num_steps=2, num_draft_tokens=5, page_size=4, batch=3)
# Drafters and families once, both places of the drafter's weights, all graph modes, samplings that read all logits.
CELLS = (
    (dict(SMALL, kind="eagle3", family="qwen3", graph="round"), "sharded"),
    (dict(SMALL, kind="eagle", family="mistral", graph="step", sampling="warm"), "sharded"),
    (dict(SMALL, kind="eagle3", family="twins", graph="phase", release="round", extend="ragged"), "replicated"),
    (dict(SMALL, kind="eagle", topk=1, sampling="filtered", verifier="rejection", mode="free"), "replicated"),
    (dict(SMALL, kind="eagle3", family="gpt_oss", graph="round", batch=1), "sharded"),
    (dict(SMALL, kind="eagle", family="qwen3_moe", topk=1, batch=1, num_steps=0), "sharded"),
    (dict(SMALL, kind="mtp", family="deepseek_v3", graph="step"), "sharded"),
    (dict(SMALL, kind="mtp.one", graph="phase", sampling="warm"), "sharded"),
)
NAMES = ["round", "step", "phase", "free", "experts", "experts of a row", "modules", "one module"]
TREE = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4)


def _checked(setting, draft_parallel, _):
    return check(cell_of(setting), device="cpu", shares=Shares(2, draft_parallel))


@pytest.mark.by_default("phase", "experts", "modules")
@pytest.mark.parametrize(("setting", "draft_parallel"), CELLS, ids=NAMES)
def test_two_ranks_equal_the_reference(in_ranks, setting, draft_parallel):
    """Both ranks compare every phase with the reference, their own heads of the KV, and a digest with each other."""
    for result in in_ranks(partial(_checked, setting, draft_parallel)):
        assert result.first_divergence is None
        assert not result.is_empty


def _generated(options, sampling, ranks):
    parts = None if ranks is None else Parts(ranks.part, ranks.part)
    made = generate(load(drafter="eagle3", parts=parts), ["def f(x):", "x = 1"], TREE, sampling, engine=options)
    return [output.token_ids for output in made.outputs]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.whole), 1.0])
def test_slices_that_were_read_generate_the_same(in_ranks, temperature):
    """Two ranks, each with only its slices of the checkpoint, continue as one rank with the whole."""
    sampling = SamplingParams(max_new_tokens=6, temperature=temperature)
    alone = _generated(EngineOptions("fast", device="cpu"), sampling, None)
    shared = EngineOptions("fast", device="cpu", tensor_parallel=2, compare_ranks=True)
    assert in_ranks(partial(_generated, shared, sampling)) == [alone, alone]


def _refused(pair, draft_parallel, _):
    options = EngineOptions("fast", device="cpu", tensor_parallel=2, draft_parallel=draft_parallel)
    generate(make_pair(pair, torch.float32), [[1, 2]], TREE, engine=options)


@pytest.mark.parametrize(
    ("pair", "draft_parallel"),
    [("mtp-llama", "replicated"), ("standalone-llama", "sharded"), ("frozen-kv-llama", "sharded")],
)
def test_what_ranks_cannot_share_is_refused(in_ranks, pair, draft_parallel):
    with pytest.raises(RankFailed, match=r"InputError: (tensor|draft)_parallel is"):
        in_ranks(partial(_refused, pair, draft_parallel))


class _Learning:
    """A policy that keeps the seconds it learns."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def observe(self, setting, accepted, seconds) -> None:
        self.seconds.append(seconds)


def _learned(ranks):
    policy: Any = _Learning()
    engine: Any = SimpleNamespace(options=EngineOptions("fast", device="cpu", tensor_parallel=2))
    requests = [SimpleNamespace(request_id=0)]
    launched: Any = SimpleNamespace(step=3, is_round=True, requests=requests, choice=Choice(0))
    delivery: Any = SimpleNamespace(token_ids=[1, 2])
    adaptation = Adaptation(engine, policy)
    adaptation.observe(launched, [delivery], now=1.0)
    adaptation._starts[3] = 1.0
    adaptation.observe(launched, [delivery], now=2.0 + 5 * ranks.rank)
    return policy.seconds[1:]


def test_policies_of_all_ranks_learn_the_seconds_of_rank_0(in_ranks):
    assert in_ranks(_learned) == [[1.0], [1.0]]


def _adaptive(ranks):
    engine = EngineOptions("fast", device="cpu", tensor_parallel=2, compare_ranks=True)
    pair = make_pair("eagle3-llama", torch.float32)
    sampling = SamplingParams(max_new_tokens=10)
    made = generate(pair, [[1, 2], [3, 4, 5]], TREE, sampling, engine=engine, adaptive="throughput")
    assert made.switching is not None
    return [output.token_ids for output in made.outputs], made.switching.switches


def test_ranks_switch_settings_together(in_ranks):
    first, second = in_ranks(_adaptive)
    assert first == second
    assert first[1] > 0


def _ends(ranks):
    if ranks.rank == 1:
        raise KeyError("gone")
    ranks.gather_objects(None)


def test_an_error_of_one_rank_ends_both():
    with pytest.raises(RankFailed, match=r"rank [01]"):
        run_in_ranks(_ends)


def test_a_silent_rank_is_named():
    with pytest.raises(RankFailed, match="rank 1"):
        run_in_ranks(lambda ranks: time.sleep(60) if ranks.rank else None, timeout=2.0)
