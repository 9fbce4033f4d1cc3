"""Distribution of plain decoding of a small-vocabulary model, in float64 numpy, without any engine code."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from specsim.core.config import SamplingParams
from specsim.correctness.statistics.small_vocabulary import SmallVocabulary


def next_distribution(
    model: SmallVocabulary, text: Sequence[int], prompt_len: int, params: SamplingParams
) -> np.ndarray:
    """Compute the distribution f64 [V] of the next token of a text.

    The text has at least two tokens, the first `prompt_len` of them given.
    """
    logits_V = model.logits(*text[-2:])
    for token in set(text):
        factor = params.repetition_penalty
        logits_V[token] *= 1 / factor if logits_V[token] > 0 else factor
    for token, count in Counter(text[prompt_len:]).items():
        logits_V[token] -= params.presence_penalty + params.frequency_penalty * count
    weight_V = np.exp((logits_V - logits_V.max()) / params.temperature)
    ranked = sorted(range(len(weight_V)), key=lambda token: (-weight_V[token], token))
    tokens = ranked[: params.top_k or len(ranked)]
    tokens = _nucleus(tokens, weight_V / weight_V[tokens].sum(), params.top_p)
    tokens = [token for token in tokens if weight_V[token] >= params.min_p * weight_V[tokens[0]]]
    prob_V = np.zeros_like(weight_V)
    prob_V[tokens] = weight_V[tokens] / weight_V[tokens].sum()
    return prob_V


def _nucleus(ranked: list[int], prob_V: np.ndarray, top_p: float) -> list[int]:
    """Choose the fewest of the most likely tokens whose mass reaches top_p."""
    before = 0.0
    for count, token in enumerate(ranked):
        if before >= top_p < 1:
            return ranked[:count]
        before += prob_V[token]
    return ranked


def draft_distribution(model: SmallVocabulary, last: int, temperature: float) -> np.ndarray:
    """Compute the drafter's distribution f64 [V] after the last token."""
    weight_V = np.exp((model.draft_VV[:, last] - model.draft_VV[:, last].max()) / temperature)
    return weight_V / weight_V.sum()
