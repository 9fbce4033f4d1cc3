"""specsim probe finds faults that are injected into specsim serve, and nothing without one."""

from dataclasses import dataclass, replace
from itertools import count
from unittest.mock import patch

import httpx
import pytest
import torch

pytest.importorskip("starlette", reason="an extra: specsim[serve]")

from specsim.cli.probe import ProbeOptions
from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.rule import Accepted
from specsim.correctness.explain import Noise
from specsim.correctness.probe import Connection, ProbeReport, ProbeSettings, Server, probe, sampling
from specsim.correctness.probe.report import PROPERTIES
from specsim.correctness.statistics.small_vocabulary import VOCAB, opposed
from specsim.models.load import load
from specsim.reference import verify
from specsim.reference.sampling import argmax, inverse_cdf
from specsim.serving.http import openai
from specsim.serving.http.app import create_app
from specsim.serving.http.limits import ServerLimits
from specsim.serving.http.server_engine import load_server_engine
from specsim.serving.http.service import Service
from specsim.serving.requests import Request

_node_logits, _walk, _walks, _accepted, _draws = (
    verify.node_logits, verify.walk, verify._walks, verify.accepted, verify.round_draws,
)  # fmt: skip
_take, _request, _usage, _chunks = Request.take, Service._request, openai._usage, openai.chunks
_clock = count(1)
DEFAULT_SAMPLES = ProbeOptions(url="http://server").samples


def with_sampling(batch, **changes):
    return replace(batch, sampling=replace(batch.sampling, **changes))


def accept_every_draft(tree, adjusted_NV):
    path = tree.path(len(tree.chain()))
    return Accepted(path, int(argmax(adjusted_NV[path[-1]])))


def sample_every_draft(tree, prob_NV, draft_prob_MV, draws, config, rule=None):
    path = tree.path(len(tree.chain()))
    return Accepted(path, inverse_cdf(prob_NV[path[-1]], draws.final))


def bonus_of_drafter(tree, prob_NV, draft_prob_MV, draws, config, rule=None):
    path, bonus = _accepted(tree, prob_NV, draft_prob_MV, draws, config, rule)
    has_draft = draft_prob_MV is not None and path[-1] < len(draft_prob_MV)
    return Accepted(path, inverse_cdf(draft_prob_MV[path[-1]], draws.final) if has_draft else bonus)


def bonus_at_half_temperature(weight_V, uniform):
    return inverse_cdf(weight_V**2, uniform)


def without_top_p(batch, *arguments):
    return _walks(with_sampling(batch, top_p=torch.ones_like(batch.sampling.top_p)), *arguments)


def without_min_p(batch, *arguments):
    return _walks(with_sampling(batch, min_p=torch.zeros_like(batch.sampling.min_p)), *arguments)


def without_penalties(batch, *arguments):
    none = torch.zeros_like(batch.sampling.presence_penalty)
    return _node_logits(with_sampling(batch, presence_penalty=none, frequency_penalty=none), *arguments)


def penalties_of_the_first(batch, *arguments):
    first = batch.sampling.presence_penalty[:1].expand(batch.size)
    return _node_logits(with_sampling(batch, presence_penalty=first), *arguments)


def grammar_at_the_root(batch, verify_input, logits_RV, config, pools, allowed=None):
    if allowed is not None:
        allowed = allowed.clone()
        allowed[:, 1:] = True
    return _node_logits(batch, verify_input, logits_RV, config, pools, allowed)


def shifted_logprobs(*arguments):
    verdict = _walk(*arguments)
    return replace(verdict, logprobs=verdict.logprobs.roll(1, dims=1))


def logprobs_of_drafter(batch, verify_input, *arguments):
    verdict = _walk(batch, verify_input, *arguments)
    if verify_input.draft_prob is None:
        return verdict
    logprobs = verdict.logprobs.clone()
    for request, draft_prob_MV in enumerate(verify_input.draft_prob):
        for node in range(int(verdict.num_accepted_drafts[request])):
            logprobs[request, node] = draft_prob_MV[node, verify_input.draft_tokens[request, node + 1]].log()
    return replace(verdict, logprobs=logprobs)


def unseeded_draws(batch, *arguments):
    return _draws(replace(batch, seeds=batch.seeds + next(_clock)), *arguments)


def stop_at_the_end_of_a_round(request, token_ids, logprobs):
    params = request.params
    text = request.tokenizer.decode([*request.token_ids, *token_ids])
    request.params = replace(params, stop=tuple(filter(text.endswith, params.stop)))
    try:
        kept = _take(request, token_ids[:-1], logprobs[:-1]) if not request.params.stop else 0
        return kept + _take(request, token_ids[kept:], logprobs[kept:])
    finally:
        request.params = params


def usage_of_drafts(call, results):
    usage = _usage(call, results)
    drafted = sum(len(progress.request.accepted) for progress in results)
    return usage | {name: usage[name] + drafted for name in ("completion_tokens", "total_tokens")}


def request_of_one_stream(service, ask):
    return _request(service, ask if ask.seeded_stream is None else replace(ask, seeded_stream=0))


async def without_second_chunk(*arguments):
    number = 0
    async for chunk in _chunks(*arguments):
        number += 1
        if number != 2:
            yield chunk


@dataclass(frozen=True)
class ServerFault:
    """A fault, and the property that breaks."""

    property: str
    target: str  # function that is replaced
    wrong: object
    samples: int = 48  # that show it

    def injected(self):
        return patch(self.target, self.wrong)


_VERIFY = "specsim.reference.verify"
_ACCEPTANCE = "specsim.reference.acceptance"
_OPENAI = "specsim.serving.http.openai"
FAULTS = {
    "drafts are not verified": ServerFault("greedy", f"{_VERIFY}.greedy", accept_every_draft),
    "sampled drafts are always accepted": ServerFault("temperature", f"{_VERIFY}.accepted", sample_every_draft),
    "bonus is drawn from the drafter": ServerFault("temperature", f"{_VERIFY}.accepted", bonus_of_drafter),
    "bonus is not from the residual": ServerFault(
        "temperature", f"{_ACCEPTANCE}.residual", lambda prob_V, draft_prob_V: prob_V, DEFAULT_SAMPLES
    ),
    "bonus is drawn at half temperature": ServerFault(
        "temperature", f"{_ACCEPTANCE}.inverse_cdf", bonus_at_half_temperature, DEFAULT_SAMPLES
    ),
    "top_p is ignored for drafts": ServerFault("top-p", f"{_VERIFY}._walks", without_top_p),
    "min_p is ignored for drafts": ServerFault("min-p", f"{_VERIFY}._walks", without_min_p),
    "penalties are ignored for drafts": ServerFault("penalties", f"{_VERIFY}.node_logits", without_penalties),
    "penalties leak to other requests": ServerFault("batched", f"{_VERIFY}.node_logits", penalties_of_the_first),
    "grammar is ignored for drafts": ServerFault("grammar", f"{_VERIFY}.node_logits", grammar_at_the_root),
    "logprobs are shifted": ServerFault("logprobs", f"{_VERIFY}.walk", shifted_logprobs),
    "logprobs are the drafter's": ServerFault("logprobs", f"{_VERIFY}.walk", logprobs_of_drafter),
    "logprobs are halved": ServerFault("listing", f"{_OPENAI}.clipped", lambda logprob: max(logprob, -9999.0) / 2),
    "seed is ignored": ServerFault("seed", f"{_VERIFY}.round_draws", unseeded_draws),
    "stop inside a round is missed": ServerFault(
        "stop", "specsim.serving.requests.Request.take", stop_at_the_end_of_a_round
    ),
    "usage counts drafts": ServerFault("usage", f"{_OPENAI}._usage", usage_of_drafts),
    "choices share random numbers": ServerFault(
        "choices", "specsim.serving.http.service.Service._request", request_of_one_stream
    ),
    "a chunk of a stream is lost": ServerFault("stream", f"{_OPENAI}.chunks", without_second_chunk),
}

SPECULATION = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, verifier="rejection")
SETTINGS = ProbeSettings(Noise.of("float32"), ("ab", "The old", "Q: why"), max_tokens=12)


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(ord("a") + token) for token in ids)


def run(pair, only, settings=SETTINGS):
    """Probe a server of this process."""
    engine = load_server_engine(pair, SPECULATION, EngineOptions())
    report = ProbeReport("u", None)
    with Service(pair, engine, ServingConfig(num_slots=16384, max_running=64), ServerLimits()) as service:
        transport = httpx.ASGITransport(create_app(service))
        with Server("http://server", Connection(timeout=600.0), transport=transport) as server:
            probe(report, server, None, settings, only)
    return report


def pair_for(only):
    """Choose the small vocabulary, or for a grammar the shipped pair, which has an end token."""
    if "grammar" in only:
        return load("tiny"), replace(SETTINGS, prompts=SETTINGS.prompts[:1])
    return replace(opposed().pair(), tokenizer=Letters()), SETTINGS


@pytest.mark.by_default(
    "drafts are not verified",
    "bonus is drawn from the drafter",
    "penalties leak to other requests",
    "stop inside a round is missed",
    "a chunk of a stream is lost",
)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_the_property_that_it_breaks(name, pytestconfig):
    """Every fault with the default number of samples where all run."""
    fault = FAULTS[name]
    pair, settings = pair_for([fault.property])
    settings = replace(settings, samples=DEFAULT_SAMPLES if pytestconfig.getoption("--whole") else fault.samples)
    with fault.injected():
        (result,) = run(pair, [fault.property], settings).properties
    assert (result.name, result.verdict) == (fault.property, "fails"), result.says


@pytest.mark.parametrize(
    "only",
    [
        pytest.param(["grammar"], marks=pytest.mark.whole, id="tiny"),
        pytest.param([name for name in PROPERTIES if name != "grammar"], id="small"),
    ],
)
def test_without_a_fault_every_property_holds(only, monkeypatch, pytestconfig):
    pair, settings = pair_for(only)
    settings = replace(settings, samples=DEFAULT_SAMPLES)
    if not pytestconfig.getoption("--whole"):
        monkeypatch.setattr(sampling, "_LENGTH", 4)  # fewer contexts to score
        settings = replace(settings, prompts=settings.prompts[:2], samples=64)
    report = run(pair, only, settings)
    assert {result.name: result.verdict for result in report.properties} == dict.fromkeys(only, "holds")
