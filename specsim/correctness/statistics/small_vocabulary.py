"""A narrow pair whose law is known: ordinary checkpoints in which a token's law depends on the two tokens before it.

The target is a decoder of one layer whose queries and keys are 0 and whose window is two: a row attends alike to itself
and to the token before, from whose KV it learns that token's class. So slots, positions, windows and masks all enter
the law. The drafter, an EAGLE head without attention, reads the last token alone.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.layout import Layout, drafter_layout, target_layout

VOCAB, CLASSES, HIDDEN = 16, 2, 64
EPS = 1e-6
_OWN, _BEFORE, _DRAFT = VOCAB, VOCAB + CLASSES, VOCAB + 2 * CLASSES  # where these features begin
_FORBIDDEN = -1e4
_CONFIG = ModelConfig(
    family="mistral",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    rms_norm_eps=EPS,
    max_position_embeddings=256,
    rope_theta=10000.0,
    sliding_windows=(2,),
)


@dataclass(frozen=True, slots=True)
class Narrow:
    """Tables of logits, f64. last_VV: what the last token (second index) says of the next one; before_VC: what the
    classes of the last two, half each, add; draft_VV: the drafter's.

    The class of a token is its number modulo 2. The target's norm divides last_VV and before_VC by the root mean square
    of the features, which the law takes into account.
    """

    last_VV: np.ndarray
    before_VC: np.ndarray
    draft_VV: np.ndarray

    def logits(self, before: int, last: int) -> np.ndarray:
        """The target's, f64 [V], after two tokens."""
        heard_C = np.zeros(CLASSES)
        for token in (before, last):
            heard_C[token % CLASSES] += 0.5
        scale = np.sqrt((2 + heard_C @ heard_C) / HIDDEN + EPS)
        return (self.last_VV[:, last] + self.before_VC @ heard_C) / scale / np.sqrt(HIDDEN)

    def pair(self) -> Pair:
        """Checkpoints of float64 tensors."""
        head = DrafterConfig("eagle", _CONFIG, draft_vocab_size=VOCAB, target_hidden_size=HIDDEN)
        target = TargetCheckpoint(_CONFIG, self._target())
        return Pair(target, DrafterCheckpoint(head, _drafter(head)), None, "narrow")

    def _target(self) -> dict[str, torch.Tensor]:
        tensors, token = _blank(target_layout(_CONFIG)), torch.arange(VOCAB)
        tensors["model.embed_tokens.weight"][token, token] = 1.0
        tensors["model.embed_tokens.weight"][token, _OWN + token % CLASSES] = 1.0
        normed = (2 / HIDDEN + EPS) ** -0.5
        for each in range(CLASSES):
            tensors["model.layers.0.self_attn.v_proj.weight"][each, _OWN + each] = 1 / normed
            tensors["model.layers.0.self_attn.o_proj.weight"][_BEFORE + each, each] = 1.0
        tables = (self.last_VV / HIDDEN**0.5, self.before_VC / HIDDEN**0.5, self.draft_VV)
        for start, table in zip((0, _BEFORE, _DRAFT), tables, strict=True):
            tensors["lm_head.weight"][:, start : start + table.shape[1]] = torch.from_numpy(table)
        return tensors


def opposed(seed: int = 0) -> Narrow:
    """A drafter that likes what the target dislikes, and the target's favourite more than the target does.

    So drafts are accepted too, and uniforms decide it also where a filter leaves few tokens. Four kinds of last
    token and three pairs of classes are told apart: twelve laws, each met often.
    """
    generator = np.random.default_rng(seed)
    last_VV = generator.normal(0, 0.9, (VOCAB, 4))[:, np.arange(VOCAB) // 4]
    draft_VV = -0.6 * last_VV
    draft_VV[last_VV.argmax(0), np.arange(VOCAB)] = draft_VV.max(0) + 1.5
    return Narrow(last_VV, generator.normal(0, 2.5, (VOCAB, CLASSES)), draft_VV)


def dyadic() -> Narrow:
    """Laws that are even on 2 or 4 tokens, so that every sum of probabilities is exact in float32 in any order.

    A token is allowed where the bits of its number are as the tokens before want them. The drafter knows bit 1, asks
    for a bit 0 that the target leaves open, and after some tokens for a bit 2.
    """
    last_VV, before_VC, draft_VV = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, CLASSES)), np.zeros((VOCAB, VOCAB))
    for following, last in product(range(VOCAB), repeat=2):
        bits = [following >> place & 1 for place in range(4)]
        is_wrong = bits[1] != (last >> 3 ^ last) & 1
        last_VV[following, last] = _FORBIDDEN * is_wrong
        draft_VV[following, last] = _FORBIDDEN * (is_wrong or bits[0] != last >> 1 & 1 or (bits[2] and last >> 2 & 1))
        before_VC[following, last % CLASSES] = _FORBIDDEN * bits[2 + last % CLASSES]
    return Narrow(last_VV, before_VC, draft_VV)


def _drafter(config: DrafterConfig) -> dict[str, torch.Tensor]:
    """fc hands the embedding on, which lies where the target's features are 0, and attention adds nothing."""
    tensors, token = _blank(drafter_layout(config)[0]), torch.arange(VOCAB)
    tensors["embed_tokens.weight"][token, _DRAFT + token] = 1.0
    tensors["fc.weight"][:, :HIDDEN] = torch.eye(HIDDEN, dtype=torch.float64)
    return tensors


def _blank(layout: Layout) -> dict[str, torch.Tensor]:
    """Norms are 1 and all else is 0."""
    return {name: torch.full(shape, float("norm" in name), dtype=torch.float64) for name, shape in layout.items()}
