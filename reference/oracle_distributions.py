"""Distributions of the oracle's next token, from its logits, and draws from them, all float64 [V]."""

import torch

from specsim.core.config import SamplingParams


def next_distribution(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Distribution of the next token: softmax(logits / T), top-k, top-p, min-p, renormalised after each."""
    prob_V = (logits / sampling.temperature).softmax(-1)
    if sampling.top_k:
        prob_V = restricted(prob_V, ranked(prob_V)[: sampling.top_k])
    if sampling.top_p < 1:
        order = ranked(prob_V)
        before = [0.0, *prob_V[order].cumsum(0).tolist()[:-1]]
        prob_V = restricted(prob_V, [i for i, mass in zip(order, before, strict=True) if mass < sampling.top_p])
    if sampling.min_p:
        prob_V = restricted(prob_V, (prob_V >= sampling.min_p * prob_V.max()).nonzero().flatten().tolist())
    return prob_V


def restricted(prob_V: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Condition a distribution on some tokens."""
    restricted_V = torch.zeros_like(prob_V)
    restricted_V[tokens] = prob_V[tokens]
    return restricted_V / restricted_V.sum()


def logprob(logits: torch.Tensor, token: int, sampling: SamplingParams) -> float:
    """Log probability of a token at the temperature (1 when greedy), without filters."""
    return float((logits / (sampling.temperature or 1.0)).log_softmax(-1)[token])


def inverse_cdf(mass_V: torch.Tensor, uniform: float) -> int:
    """Find the first id that has mass and whose cumulative mass exceeds the share `uniform` of the total."""
    cdf_V = mass_V.cumsum(0)
    return int(((cdf_V > uniform * cdf_V[-1]) & (mass_V > 0)).nonzero()[0])


def ranked(values: torch.Tensor) -> list[int]:
    """Sort indices from the largest value to the smallest, equal values in ascending order."""
    return values.sort(descending=True, stable=True).indices.tolist()
