"""Small-vocabulary test models: ordinary checkpoints whose distributions depend on the last two tokens.

The target is a decoder of one layer whose queries and keys are 0 and whose window is two: a row attends equally to
itself and to the token before, and reads that token's class from its KV. So slots, positions, windows and masks all
enter the distribution. A drafter with weights, such as an EAGLE head without attention, reads only the last token.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specsim.core.config import SamplingParams
from specsim.core.kinds import TESTED
from specsim.core.pair import Pair, TargetCheckpoint
from specsim.core.target import DenseMLP, HeadAttention, LayerConfig, ModelConfig, Rope
from specsim.core.verifiers import resolve
from specsim.models.checkpoint.layout import target_layout
from specsim.models.synthetic.drafter import lookup_of
from specsim.models.synthetic.weights import CLASSES, DRAFT, HIDDEN, VOCAB, blank
from specsim.models.synthetic_pair import as_variant

KIND = "eagle"  # drafter of a test that names none
EPS = 1e-6
_OWN = VOCAB  # first feature of the own class
_BEFORE = VOCAB + CLASSES  # first feature of the attended classes
_LAYER = LayerConfig(HeadAttention(1, 1, 16, Rope(10000.0, 16), window=2), DenseMLP(16))
_CONFIG = ModelConfig(
    family="mistral",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    rms_norm_eps=EPS,
    max_position_embeddings=256,
    layers=(_LAYER,),
)


@dataclass(frozen=True, slots=True)
class SmallVocabulary:
    """Logit tables of a model, f64.

    The target's norm divides last_VV and before_VC by the root mean square of the features, which `logits` includes.
    """

    last_VV: np.ndarray  # [next token, last token], the last token's part
    before_VC: np.ndarray  # [next token, class], the part of the last two tokens' classes, half each
    draft_VV: np.ndarray  # [next token, last token], the drafter's logits

    def logits(self, before: int, last: int) -> np.ndarray:
        """Compute the target's logits f64 [V] after two tokens."""
        heard_C = np.zeros(CLASSES)
        for token in (before, last):
            heard_C[token % CLASSES] += 0.5
        scale = np.sqrt((2 + heard_C @ heard_C) / HIDDEN + EPS)
        return (self.last_VV[:, last] + self.before_VC @ heard_C) / scale / np.sqrt(HIDDEN)

    def pair(self, kind: str = KIND) -> Pair:
        """Make checkpoints with float64 tensors, or a drafter without weights for the same target.

        kind: one that `specsim sampling-test` runs, or EAGLE heads.
        """
        record = TESTED[kind]
        if record.has_weights:
            drafter = resolve(record.synthetic).small(_CONFIG, torch.from_numpy(self.draft_VV))
        else:
            drafter = lookup_of(record).small
        target = TargetCheckpoint(_CONFIG, self._target())
        return as_variant(kind, Pair(target, drafter, None, "small vocabulary"))

    def _target(self) -> dict[str, torch.Tensor]:
        tensors = blank(target_layout(_CONFIG))
        token = torch.arange(VOCAB)
        tensors["model.embed_tokens.weight"][token, token] = 1.0
        tensors["model.embed_tokens.weight"][token, _OWN + token % CLASSES] = 1.0
        normed = (2 / HIDDEN + EPS) ** -0.5
        for token_class in range(CLASSES):
            tensors["model.layers.0.self_attn.v_proj.weight"][token_class, _OWN + token_class] = 1 / normed
            tensors["model.layers.0.self_attn.o_proj.weight"][_BEFORE + token_class, token_class] = 1.0
        tables = (self.last_VV / HIDDEN**0.5, self.before_VC / HIDDEN**0.5, self.draft_VV)
        for start, table in zip((0, _BEFORE, DRAFT), tables, strict=True):
            tensors["lm_head.weight"][:, start : start + table.shape[1]] = torch.from_numpy(table)
        return tensors


def opposed() -> SmallVocabulary:
    """Make a drafter that prefers tokens of low target probability and overrates the target's best token.

    So some drafts are accepted, and uniforms decide which ones even where a filter leaves few tokens. Four kinds of
    last token and three pairs of classes make twelve distributions; each occurs often.
    """
    generator = np.random.default_rng(0)
    last_VV = generator.normal(0, 0.9, (VOCAB, 4))[:, np.arange(VOCAB) // 4]
    draft_VV = -0.6 * last_VV
    draft_VV[last_VV.argmax(0), np.arange(VOCAB)] = draft_VV.max(0) + 1.5
    return SmallVocabulary(last_VV, generator.normal(0, 2.5, (VOCAB, CLASSES)), draft_VV)


def next_distribution(
    model: SmallVocabulary, text: Sequence[int], prompt_len: int, params: SamplingParams
) -> np.ndarray:
    """Compute the distribution f64 [V] of the next token of a text.

    The text has at least two tokens, the first `prompt_len` of them given.
    """
    return processed_distribution(model.logits(*text[-2:]), text, prompt_len, params)


def processed_distribution(
    logits_V: np.ndarray, text: Sequence[int], prompt_len: int, params: SamplingParams
) -> np.ndarray:
    """Compute the distribution f64 [V] that penalties, temperature and filters make of logits f64 [V].

    text: all tokens before, the first `prompt_len` of them given.
    """
    logits_V = logits_V.copy()
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
