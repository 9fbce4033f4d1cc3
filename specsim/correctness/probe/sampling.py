"""Sampled tokens against the distribution that the server's own log probabilities give.

A bias of 100 leaves the tokens of the greedy answer and a few others, so that drafts can still be right. Each context
is scored once by a request of one token, which no draft changes. Temperature, filters and penalties are then applied in
float64. Its log probabilities are off by noise; contexts in which noise changes the tokens that a filter keeps are left
out, and n tokens may raise the logarithm of the e-value by n times the square of the noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, NamedTuple

import numpy as np

from specsim.core.config import SamplingParams
from specsim.correctness.probe.session import NO_IDS, ProbeSession, PropertyResult
from specsim.correctness.statistics.e_value import Sample, detectable_distance, ln_e_value
from specsim.correctness.statistics.small_vocabulary import processed_distribution
from specsim.correctness.statistics.suite import FALSE_ALARM

_SUPPORT = 5  # tokens that the bias leaves
_BIAS = 100.0
_LENGTH = 6  # new tokens of a sampled answer
_LEAST_NOISE = 1e-6
# Settings of each property; the first one's distribution without its last parameter shows whether that was ignored.
SETTINGS = {
    "temperature": (SamplingParams(temperature=1.0), SamplingParams(temperature=0.5)),
    "top-p": (SamplingParams(temperature=1.0, top_p=0.7),),
    "min-p": (SamplingParams(temperature=1.0, min_p=0.25),),
    "penalties": (SamplingParams(temperature=1.0, presence_penalty=0.8, frequency_penalty=0.7),),
}
_PLAIN = SamplingParams(temperature=1.0)
_Past = tuple[int, tuple[int, ...]]  # number of the prompt, and the tokens after it


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens and the contexts before them."""

    support: tuple[int, ...]  # token ids
    cells: tuple[int, ...]  # place of each token in the support; its length for any other token
    pasts: tuple[_Past, ...]

    @property
    def contexts(self) -> list[_Past]:
        """Different contexts."""
        return list(dict.fromkeys(self.pasts))


class _Tested(NamedTuple):
    ln_e_value: float
    num_tokens: int
    num_contexts: int
    detectable: float  # total variation


def sampled(session: ProbeSession, name: str) -> PropertyResult:
    """Test the distribution of sampled tokens under each setting of a property."""
    if not session.has_ids:
        return PropertyResult(name, "cannot be shown", NO_IDS)
    checked = 0
    largest = 0.0
    for params in SETTINGS[name]:
        draws = _draw(session, params)
        logits = _score(session, draws)
        tested = _test(session, draws, logits, params)
        checked += tested.num_tokens
        label = _label(params)
        if tested.ln_e_value > -log(FALSE_ALARM):
            ignoring = _test(session, draws, logits, _PLAIN).ln_e_value
            fits = params != _PLAIN and ignoring <= -log(FALSE_ALARM)
            says = f"{label}: {tested.num_tokens} tokens do not follow its own probabilities, p < {FALSE_ALARM:g}"
            return PropertyResult(name, "fails", says + f"; it ignores {name}" * fits, checked)
        if not tested.detectable < 1:
            says = f"{label}: {tested.num_tokens} tokens are too few to find any error"
            return PropertyResult(name, "cannot be shown", says, checked)
        largest = max(largest, tested.detectable)
    says = f"tokens follow the server's own probabilities; a total variation of {largest:.2f} would have been found"
    return PropertyResult(name, "holds", says, checked)


def _label(params: SamplingParams) -> str:
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    return ", ".join(f"{name} {getattr(params, name):g}" for name in names if name in _request_params(params))


def _request_params(params: SamplingParams) -> dict[str, Any]:
    names = ("top_p", "min_p", "presence_penalty", "frequency_penalty")
    default = SamplingParams()
    chosen = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(default, name)}
    return {"temperature": params.temperature, **chosen}


def _draw(session: ProbeSession, params: SamplingParams) -> SampledTokens:
    """Sample answers to the first prompt, each with a seed of its own."""
    number = 0
    prompt = session.prompts[number]
    support = _support(session, number)
    bias = {str(token): _BIAS for token in support}
    seeds = range(session.settings.seed, session.settings.seed + session.settings.samples)
    bodies = [
        session.body(prompt, max_tokens=_LENGTH, logit_bias=bias, seed=seed, **_request_params(params))
        for seed in seeds
    ]
    cells = []
    pasts = []
    for reply in session.server.ask(bodies):
        tokens = tuple(int(token) for token in reply.answer.tokens)
        for index, token in enumerate(tokens):
            cells.append(support.index(token) if token in support else len(support))
            pasts.append((number, tokens[:index]))
            if token not in support:
                break
    return SampledTokens(support, tuple(cells), tuple(pasts))


def _support(session: ProbeSession, number: int) -> tuple[int, ...]:
    """Choose the first different tokens of the greedy answer, and the likeliest others at its beginning."""
    answer = session.solo[number].answer
    greedy = dict.fromkeys(answer.tokens[: _SUPPORT - 1])
    likely = sorted(answer.top[0], key=lambda token: -answer.top[0][token])
    return tuple(int(token) for token in [*greedy, *(token for token in likely if token not in greedy)][:_SUPPORT])


def _score(session: ProbeSession, draws: SampledTokens) -> dict[_Past, np.ndarray]:
    """Ask for the log probabilities of the support after each context, f64 [K], or logits that differ by a constant.

    A server that reports them without the bias may list other tokens: then each token of the support is forced.
    """
    bias = {str(token): _BIAS for token in draws.support}
    prompts = {past: [*session.prompts[past[0]], *past[1]] for past in draws.contexts}
    bodies = [
        session.body(prompt, max_tokens=1, temperature=1.0, seed=0, logit_bias=bias) for prompt in prompts.values()
    ]
    logits = {}
    hidden = []
    for past, reply in zip(prompts, session.server.ask(bodies), strict=True):
        top = reply.answer.top[0]
        if all(token in top for token in draws.support):
            logits[past] = np.array([top[token] for token in draws.support])
        else:
            hidden.append(past)
    forced = session.server.ask(
        [
            session.body(prompts[past], max_tokens=1, logit_bias={str(token): _BIAS})
            for past in hidden
            for token in draws.support
        ]
    )
    values = [reply.answer.logprobs[0] for reply in forced]
    for index, past in enumerate(hidden):
        logits[past] = np.array(values[index * len(draws.support) :][: len(draws.support)], dtype=float)
    return logits


def _test(
    session: ProbeSession, draws: SampledTokens, logits: dict[_Past, np.ndarray], params: SamplingParams
) -> _Tested:
    """Compute the e-value of tokens in contexts whose distribution noise does not change much, less its allowance."""
    noise = max(4 * session.measured_noise, _LEAST_NOISE)
    probs = {}
    for past in draws.contexts:
        text = [draws.support.index(token) for token in past[1]]
        prob_V = _distribution(logits[past], text, params)
        supports = {tuple(_distribution(logits[past], text, other) > 0) for other in _near(params, noise)}
        if supports == {tuple(prob_V > 0)}:
            probs[past] = np.append(prob_V, 0.0)
    tested_indices = [index for index, past in enumerate(draws.pasts) if past in probs]
    if not tested_indices:
        return _Tested(0.0, 0, 0, float("nan"))
    sample = _sample(
        [draws.cells[index] for index in tested_indices], [draws.pasts[index] for index in tested_indices], probs, draws
    )
    value = ln_e_value(sample) - len(sample) * noise**2
    detectable = float("nan") if value > -log(FALSE_ALARM) else detectable_distance(sample, FALSE_ALARM)
    return _Tested(value, len(sample), len(probs), detectable)


def _distribution(logits_V: np.ndarray, text: Sequence[int], params: SamplingParams) -> np.ndarray:
    return processed_distribution(logits_V, text, 0, params)


def _near(params: SamplingParams, noise: float) -> Iterator[SamplingParams]:
    """Give the filters between which noise of the log probabilities cannot tell."""
    for factor in (np.exp(-2 * noise), np.exp(2 * noise)):
        top_p = params.top_p if params.top_p == 1 else min(1.0, params.top_p * factor)
        yield replace(params, top_p=float(top_p), min_p=float(min(1.0, params.min_p * factor)))


def _sample(
    cells: Sequence[int], pasts: Sequence[_Past], probs: dict[_Past, np.ndarray], draws: SampledTokens
) -> Sample:
    numbers = {past: number for number, past in enumerate(probs)}
    past_ids = np.array([numbers[past] for past in pasts])
    prob_nV = np.stack([probs[past] for past in pasts])
    written = np.zeros_like(prob_nV, dtype=bool)
    for row, past in enumerate(pasts):
        written[row, [draws.support.index(token) for token in past[1]]] = True
    likeliest = prob_nV == prob_nV.max(1, keepdims=True)
    is_later = np.array([bool(past[1]) for past in pasts])
    tokens = [np.broadcast_to(row, prob_nV.shape) for row in np.eye(prob_nV.shape[1])[:-1]]
    ln_prob = np.log(np.where(prob_nV > 0, prob_nV, 1.0))
    marks = np.stack([written, likeliest, *tokens, ln_prob])
    return Sample(np.array(cells), prob_nV, past_ids, past_ids, is_later, marks)
