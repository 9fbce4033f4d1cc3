"""Distribution of a row's next token: penalties, bias, mask, temperature, top-k, top-p, min-p, in that order."""

import torch

from specsim.core.phases import Sampling


def topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the k largest along the last dimension, descending, ties to the lower index: (values, indices i64)."""
    ordered = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered.values[..., :k], ordered.indices[..., :k]


def argmax(values: torch.Tensor) -> torch.Tensor:
    """Find the index of the largest along the last dimension, ties to the lower index."""
    return values.argmax(dim=-1)  # the first of equal ones, as torch documents


def adjust_logits(
    logits_V: torch.Tensor,
    context: torch.Tensor,
    prompt_len: int,
    sampling: Sampling,
    request: int,
    allowed_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits after penalties, bias and grammar mask, f64 [V].

    context: i64, the tokens up to and including the row's own. Let n_x count x after the prompt. Every x in the context
    becomes z_x / repetition if z_x > 0, else z_x · repetition (arXiv 1909.05858). Then come - frequency · n_x -
    presence · [n_x > 0] + bias_x, and -inf where x is not allowed. transformers adds its bias before the repetition
    penalty, which scales both, so results differ where the context holds a token that has a bias.
    """
    logits_V = logits_V.double().clone()
    repetition = sampling.repetition_penalty[request]
    seen = context.unique()
    logits_V[seen] = torch.where(logits_V[seen] > 0, logits_V[seen] / repetition, logits_V[seen] * repetition)
    counts_V = torch.bincount(context[prompt_len:], minlength=len(logits_V))
    logits_V -= sampling.frequency_penalty[request] * counts_V + sampling.presence_penalty[request] * (counts_V > 0)
    if sampling.logit_bias is not None:
        logits_V += sampling.logit_bias[request]
    return logits_V if allowed_V is None else logits_V.masked_fill(~allowed_V, -torch.inf)


def target_prob(adjusted_V: torch.Tensor, sampling: Sampling, request: int) -> torch.Tensor:
    """Distribution p of the next token, f64 [V]: softmax(adjusted / T), filtered.

    At T = 0 the argmax has all the mass, and in a row with NaN or +inf, whose logprobs are NaN.
    """
    temperature = float(sampling.temperature[request])
    if temperature == 0 or not adjusted_V.max().isfinite():
        return torch.nn.functional.one_hot(argmax(adjusted_V), len(adjusted_V)).double()
    prob_V = torch.softmax((adjusted_V - adjusted_V.max()) / temperature, dim=-1)
    prob_V = _keep_top_k(prob_V, int(sampling.top_k[request]))
    prob_V = _keep_top_p(prob_V, float(sampling.top_p[request]))
    return _renormalise(prob_V, prob_V >= float(sampling.min_p[request]) * prob_V.max())


def _renormalise(prob_V: torch.Tensor, is_kept_V: torch.Tensor) -> torch.Tensor:
    masses = torch.where(is_kept_V, prob_V, 0.0)
    return masses / masses.sum()


def _keep_top_k(prob_V: torch.Tensor, k: int) -> torch.Tensor:
    if k == 0 or k >= len(prob_V):
        return prob_V
    kept_V = torch.zeros_like(prob_V, dtype=torch.bool)
    kept_V[topk(prob_V, k)[1]] = True
    return _renormalise(prob_V, kept_V)


def _keep_top_p(prob_V: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens with mass of at least p: less than p precedes each (arXiv 1904.09751)."""
    if p == 1:
        return prob_V
    ordered, order = topk(prob_V, len(prob_V))
    kept_V = torch.zeros_like(prob_V, dtype=torch.bool)
    kept_V[order[ordered.cumsum(-1) - ordered < p]] = True
    return _renormalise(prob_V, kept_V)


def logprob(adjusted_V: torch.Tensor, sampling: Sampling, request: int, token: int) -> float:
    """Compute log softmax(adjusted / T)[token], T = 1 when greedy, without filters."""
    temperature = float(sampling.temperature[request]) or 1.0
    return float(torch.log_softmax((adjusted_V - adjusted_V.max()) / temperature, dim=-1)[token])


def inverse_cdf(weight_V: torch.Tensor, uniform: float) -> int:
    """Find the first id with cdf > uniform · cdf[last] and weight > 0.

    Weights need not sum to one; at least one must be positive.
    """
    cdf_V = weight_V.cumsum(-1)
    return int(((cdf_V > uniform * cdf_V[-1]) & (weight_V > 0)).nonzero()[0])
