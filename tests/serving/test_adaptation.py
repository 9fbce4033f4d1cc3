"""Engines that switch settings between rounds: no token is lost or repeated, whatever a policy chooses."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from specsim import SpecConfig
from specsim.core.config import SamplingParams, ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.policies.named import named_policy
from specsim.core.policies.per_request import RequestScript
from specsim.core.policies.policy import Scripted
from specsim.core.settings import Settings
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.generation import load_adaptive_engine, load_engine
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler

from .settings import TREE

EXACT = EngineOptions("reference", torch.float64)
OTHERS = (SpecConfig(3, 2, 8, page_size=4, max_len=64), SpecConfig(1, 3, 4, page_size=4, max_len=64))
TREES = Settings((TREE, SpecConfig.plain(4, 64), *OTHERS))
CHAINS = Settings.of_steps(SpecConfig(1, 3, 4, page_size=4, max_len=64), (3, 0, 1))
SCRIPT = (0, 1, 1, 2, 0, 3, 1, 0, 2, 2, 1, 3)
PROMPTS = ([5, 17, 3, 40], [7 * i % 47 for i in range(20)], [5, 17, 3, 40, 6, 8, 9, 1, 2], [9, 8, 7])
KINDS = ("eagle", "eagle3", "p-eagle", "dflash", "dspark", "standalone", "frozen-kv", "mtp", "ngram", "suffix")


@cache
def pair_of(kind: str):
    return make_pair("mtp-llama" if kind == "mtp" else f"{kind}-noisy")  # whose drafts are accepted


def serve(engine, pair, policy=None, temperatures: tuple[float, ...] = (0.0,), new: int = 14, **serving):
    """Serve the prompts, with arrivals apart and these temperatures in turn, and return the scheduler."""
    scheduler = Scheduler(engine, ServingConfig(**{"num_slots": 640} | serving), policy=policy, audits=True)
    for number, prompt in enumerate(PROMPTS):
        temperature = temperatures[number % len(temperatures)]
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


@pytest.mark.every_value
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


def run_alone(engine, pair, request, script: list[int], **changes) -> Request:
    """Run a request again, or one with another prompt or parameters, under a script of settings."""
    fields = {"prompt": request.prompt_ids, "params": request.params} | changes
    solo = make_request(pair.target.config, None, request.request_id, **fields)
    scheduler = Scheduler(engine, ServingConfig(max_running=1, num_slots=640), policy=Scripted(script))
    scheduler.submit(solo)
    with torch.inference_mode():
        scheduler.run()
        scheduler.close()
    return solo


def replayed(engine, pair, request) -> list[int]:
    """Run a request solo, each round under the setting that it had in a batch, and return its tokens."""
    solo = run_alone(engine, pair, request, request.settings or [0])
    assert solo.settings == request.settings
    assert solo.accepted == request.accepted
    return solo.token_ids


CHAIN = SpecConfig(1, 3, 4, page_size=4, max_len=64)
SAMPLED = {
    "target_only": TREES,
    "rejection": Settings.of_steps(replace(CHAIN, verifier="rejection"), (3, 0, 1)),
    "block": Settings.of_steps(replace(CHAIN, verifier="block"), (2, 3, 0)),
    "gumbel": Settings.of_steps(replace(CHAIN, verifier="gumbel"), (1, 0, 3)),
    "multi_round": Settings(
        (
            SpecConfig(2, 3, 7, verifier="multi_round", page_size=4, max_len=64),
            SpecConfig(3, 1, 4, verifier="multi_round", page_size=4, max_len=64),
            SpecConfig.plain(4, 64),
        )
    ),
    "released": Settings.of_steps(replace(CHAIN, release="round", extend="ragged"), (3, 0, 2)),
    "released trees": Settings.of_steps(replace(TREE, release="round", draft_kv="ancestor"), (3, 0, 1)),
}


@pytest.mark.every_value
@pytest.mark.parametrize("verifier", SAMPLED)
@pytest.mark.parametrize("kind", ["eagle3", "standalone", "mtp"])
def test_sampled_outputs_equal_the_replayed_rounds(kind, verifier):
    settings = SAMPLED[verifier]
    pair = pair_of(kind)
    engine = load_adaptive_engine(pair, settings, EXACT)
    script = [choice % len(settings) for choice in SCRIPT]
    serving = {} if settings[0].release == "round" else dict(num_slots=160, schedule="overlap", prefix_cache=True)
    scheduler = serve(engine, pair, Scripted(script), (1.0,), **serving)
    for request in scheduler.requests.values():
        assert replayed(engine, pair, request) == request.token_ids
    switches = {pair for request in scheduler.requests.values() for pair in pairwise(request.settings)}
    assert len(switches) > len(settings)  # there and back


OWN_STEPS = [3, 0, 2, 1, 1, 3, 2, 0]


@pytest.mark.every_value
@pytest.mark.parametrize("serving", SERVING.values(), ids=SERVING)
@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_own_steps_keep_greedy_outputs(kind, serving):
    pair = pair_of(kind)
    settings = CHAINS if kind == "mtp" else Settings.of_steps(TREE, (3, 0, 2))
    scheduler = serve(load_adaptive_engine(pair, settings, EXACT), pair, RequestScript(settings, OWN_STEPS), **serving)
    assert tokens(scheduler) == plain_tokens()
    for request in scheduler.requests.values():
        assert len(request.draft_steps) == len(request.accepted)
        rows = zip(request.draft_steps, request.proposed, request.accepted, request.settings, strict=True)
        for steps, proposed, accepted, setting in rows:
            assert accepted - 1 <= proposed <= steps <= settings[setting].num_steps
    used = {steps for request in scheduler.requests.values() for steps in request.draft_steps}
    assert used == {0, 1, 2, 3}
    if kind not in ("ngram", "suffix"):
        assert max(count for request in scheduler.requests.values() for count in request.accepted) > 1


ALONE = {
    "chain": CHAIN,
    "tree": TREE,
    "thresholds": replace(TREE, threshold_acc=0.4),
    "typical": replace(TREE, verifier="typical"),
    "rejection": replace(CHAIN, verifier="rejection"),
    "block": replace(CHAIN, verifier="block"),
    "gumbel": replace(CHAIN, verifier="gumbel"),
    "multi_round": SpecConfig(2, 3, 7, verifier="multi_round", page_size=4, max_len=64),
    "released": replace(TREE, release="round", extend="ragged", draft_kv="ancestor", score="logprob"),
}


@pytest.mark.every_value
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("kind", ["eagle3", "standalone", "mtp", "p-eagle"])
def test_own_steps_give_the_tokens_of_a_setting_of_those(kind, name, temperature):
    """A batch whose requests have own steps in each round; alone each round has the setting of those steps.

    Without drafts gumbel's own setting draws the token by a uniform, not by noise.
    """
    pair = pair_of(kind)
    steps = (3, 1, 2) if name == "gumbel" else (3, 0, 1, 2)
    settings = Settings.of_steps(ALONE[name], steps)
    engine = load_adaptive_engine(pair, settings, EXACT)
    script = [count or steps[1] for count in OWN_STEPS]
    scheduler = serve(engine, pair, RequestScript(settings, script), (temperature,))
    for request in scheduler.requests.values():
        solo = run_alone(engine, pair, request, [steps.index(count) for count in request.draft_steps])
        assert (solo.token_ids, solo.accepted) == (request.token_ids, request.accepted)
        assert solo.proposed == request.proposed == request.draft_steps
    assert max(len(record.decoded) for record in scheduler.trace.records) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_round_accepts_as_after_a_fresh_prefill(kind):
    """The state left by rounds of other settings, plain ones included, is that of a prefill of the same tokens."""
    pair = pair_of(kind)
    settings = CHAINS if kind == "mtp" else TREES
    engine = load_adaptive_engine(pair, settings, EXACT)
    request = serve(engine, pair, Scripted([choice % len(settings) for choice in SCRIPT])).requests[1]
    start = 0  # of a round: tokens before its root
    for setting, accepted in zip(request.settings, request.accepted, strict=True):
        params = replace(request.params, max_new_tokens=2)
        prompt = request.prompt_ids + request.token_ids[:start]
        fresh = run_alone(engine, pair, request, [setting], prompt=prompt, params=params)
        assert fresh.accepted == [accepted]
        start += accepted
    assert max(request.accepted) > 1


FAST = {
    "eagle3": "round",
    "p-eagle": "round",
    "dflash": "phase",
    "dspark": "round",
    "standalone": "phase",
    "frozen-kv": "step",
    "mtp": "round",
    "ngram": "phase",
    "suffix": "phase",
}


@pytest.mark.by_default("mtp", "dspark", "ngram")
@pytest.mark.parametrize("kind", FAST)
def test_fast_equals_the_reference_over_a_script(kind, device):
    """Tokens, accepted drafts and settings of every round are the reference's, greedy and sampled in one batch."""
    pytest.importorskip("triton")
    pair = pair_of(kind)
    settings = CHAINS if kind == "mtp" else TREES
    found = []
    for options in (EXACT, EngineOptions("fast", torch.float32, device=device, graph=FAST[kind], bucket=4)):
        engine = load_adaptive_engine(pair, settings, options)
        policy = Scripted([choice % len(settings) for choice in SCRIPT])
        found.append(serve(engine, pair, policy, (0.0, 1.0), new=3, schedule="overlap", max_running=4))
    reference, fast = found
    for name in ("token_ids", "accepted", "settings", "proposed"):
        expected, made = ([getattr(each, name) for each in run.requests.values()] for run in (reference, fast))
        assert made == expected


@given(data=st.data())
@settings_of_hypothesis(max_examples=15, deadline=None)
def test_random_programs_lose_no_token(data):
    """Random settings, scripts, schedules and slots: greedy tokens are those of plain decoding."""
    kind = data.draw(st.sampled_from(KINDS), label="drafter")
    pair = pair_of(kind)
    steps = st.integers(1, 3)
    chains = steps.map(lambda count: SpecConfig(1, count, count + 1, page_size=4, max_len=64))
    trees = st.builds(lambda topk, count: SpecConfig(topk, count, page_size=4, max_len=64), st.integers(1, 3), steps)
    drafting = chains if kind == "mtp" else trees
    some = data.draw(st.lists(drafting, min_size=1, max_size=3, unique=True), label="settings")
    settings = Settings((*some, SpecConfig.plain(4, 64)))
    script = data.draw(st.lists(st.integers(0, len(some)), min_size=1, max_size=12), label="script")
    serving = dict(
        schedule=data.draw(st.sampled_from(("sync", "overlap")), label="schedule"),
        prefix_cache=data.draw(st.booleans(), label="prefix cache"),
        chunk_tokens=data.draw(st.sampled_from((None, 5)), label="chunk"),
        max_running=data.draw(st.integers(1, 4), label="running"),
        num_slots=data.draw(st.sampled_from((144, 176, 208, 640)), label="slots"),
    )
    scheduler = serve(load_adaptive_engine(pair, settings, EXACT), pair, Scripted(script), **serving)
    assert tokens(scheduler) == plain_tokens()


@pytest.mark.parametrize("kind", ["eagle3", "standalone", "mtp"])
def test_coupled_noise_gives_the_tokens_of_plain_decoding(kind):
    """Gumbel noise belongs to positions, so sampled tokens do not depend on a policy that follows acceptance."""
    pair = pair_of(kind)
    chain = replace(CHAIN, verifier="gumbel")
    rule = {"policy": "moving-average", "steps": [0, 1, 3], "first": 0, "update_interval": 1, "warmup_batches": 0}
    policy = named_policy(rule, chain)
    adaptive = load_adaptive_engine(pair, policy.settings, EXACT)
    switching = serve(adaptive, pair, policy.make(), (1.0,), num_slots=160, schedule="overlap")
    plain = serve(load_engine(pair, policy.settings[0], EXACT), pair, None, (1.0,))
    assert tokens(switching) == tokens(plain)
    assert len(set(switching.choices)) > 1


@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_synthetic_acceptance_has_the_first_rates_of_a_setting(impl, device):
    """At rates 1, 1, 0 rounds of 3, 1 and 0 steps accept 2, 1 and no drafts."""
    if impl == "fast":
        pytest.importorskip("triton")
    pair = pair_of("eagle3")
    settings = Settings.of_steps(CHAIN, (0, 1, 3))
    options = EXACT if impl == "reference" else EngineOptions("fast", torch.float32, device=device)
    acceptance = SyntheticAcceptance((1.0, 1.0, 0.0))
    engine = load_adaptive_engine(pair, settings, options, acceptance=acceptance)
    scheduler = serve(engine, pair, Scripted([2, 0, 1]), new=5)
    for request in scheduler.requests.values():
        assert request.accepted == [(1, 2, 3)[setting] for setting in request.settings]
