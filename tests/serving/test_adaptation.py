"""Engines that switch settings between rounds: no token is lost or repeated, whatever a policy chooses."""

from functools import cache

import pytest
import torch

from specsim import SpecConfig
from specsim.core.config import SamplingParams, ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.policies.policy import Scripted
from specsim.core.settings import Settings
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.generation import load_adaptive_engine, load_engine
from specsim.serving.requests import make_request
from specsim.serving.scheduler import Scheduler

EXACT = EngineOptions("reference", torch.float64)
TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=4, max_len=64)
OTHERS = (SpecConfig(3, 2, 8, page_size=4, max_len=64), SpecConfig(1, 3, 4, page_size=4, max_len=64))
TREES = Settings((TREE, SpecConfig.plain(4, 64), *OTHERS))
CHAINS = Settings.of_steps(SpecConfig(1, 3, 4, page_size=4, max_len=64), (3, 0, 1))
SCRIPT = (0, 1, 1, 2, 0, 3, 1, 0, 2, 2, 1, 3)
PROMPTS = ([5, 17, 3, 40], [7 * i % 47 for i in range(20)], [5, 17, 3, 40, 6, 8, 9, 1, 2], [9, 8, 7])
KINDS = ("eagle", "eagle3", "standalone", "frozen-kv", "mtp", "ngram", "suffix")


@cache
def pair_of(kind: str):
    return make_pair(f"{kind}-noisy")


def serve(engine, pair, policy=None, temperature: float = 0.0, new: int = 14, **serving):
    """Serve the prompts, with arrivals apart, and return the scheduler."""
    scheduler = Scheduler(engine, ServingConfig(**{"num_slots": 640} | serving), policy=policy, audits=True)
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=temperature, max_new_tokens=new + number, ignore_eos=True, seed=3)
        scheduler.submit(make_request(pair.target.config, None, number, prompt, params, arrival=2 * number))
    with torch.inference_mode():
        scheduler.run()
        scheduler.close()
    return scheduler


def tokens(scheduler) -> list[list[int]]:
    return [request.token_ids for request in scheduler.requests.values()]


@cache
def plain_tokens(new: int = 14) -> list[list[int]]:
    pair = pair_of("eagle")
    return tokens(serve(load_engine(pair, TREES[1], EXACT), pair, new=new))


SERVING = {
    "sync": dict(),
    "overlap": dict(schedule="overlap"),
    "preempted": dict(num_slots=128, schedule="overlap", prefix_cache=True),
    "chunked": dict(chunk_tokens=3, prefix_cache=True),
}


@pytest.mark.parametrize("serving", SERVING.values(), ids=SERVING)
@pytest.mark.parametrize("kind", KINDS)
def test_switches_keep_greedy_outputs(kind, serving):
    pair = pair_of(kind)
    settings = CHAINS if kind == "mtp" else TREES
    script = [choice % len(settings) for choice in SCRIPT]
    scheduler = serve(load_adaptive_engine(pair, settings, EXACT), pair, Scripted(script), **serving)
    assert tokens(scheduler) == plain_tokens()
    used = {number for request in scheduler.requests.values() for number in request.settings}
    assert used == set(range(len(settings)))
    if "num_slots" in serving and kind == "eagle":
        assert scheduler.trace.counts()["preempted"]
