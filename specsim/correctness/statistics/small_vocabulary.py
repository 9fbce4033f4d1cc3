"""Small-vocabulary test models: ordinary checkpoints whose distributions depend on the last two tokens.

The target is a decoder of one layer whose queries and keys are 0 and whose window is two: a row attends equally to
itself and to the token before, and reads that token's class from its KV. So slots, positions, windows and masks all
enter the distribution. A drafter with weights, such as an EAGLE head without attention, reads only the last token.
"""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from specsim.core.block import BlockConfig, BlockDrafterConfig, DFlashConfig, DSparkConfig
from specsim.core.drafter import BLOCK_KINDS
from specsim.core.eagle import EagleConfig
from specsim.core.layer_config import DenseMLP, HeadAttention, LayerConfig, Rope
from specsim.core.mtp import MtpConfig
from specsim.core.p_eagle import PEagleConfig
from specsim.core.pair import AnyDrafter, DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.core.standalone import StandaloneConfig
from specsim.core.target import ModelConfig
from specsim.core.token_drafter import NgramConfig, SuffixConfig
from specsim.models.checkpoint.layout import Layout, drafter_layout, target_layout
from specsim.models.other_vocabulary import bridged_pair

VOCAB = 16
BRIDGED = "standalone.tli"
CLASSES = 2  # the class of a token is its number modulo 2
HIDDEN = 64
EPS = 1e-6
_OWN = VOCAB  # first feature of the own class
_BEFORE = VOCAB + CLASSES  # first feature of the attended classes
_DRAFT = VOCAB + 2 * CLASSES  # first feature of the drafter's embedding
_FORBIDDEN = -1e4
_TOKEN_DRAFTERS = {"ngram": NgramConfig(), "suffix": SuffixConfig(offset=2.0)}
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

    def pair(self, kind: str = "eagle") -> Pair:
        """Make checkpoints with float64 tensors, or a token drafter of that kind for the same target.

        `standalone.tli`: a language model with another vocabulary, bridged to the target's.
        """
        own = "standalone" if kind == BRIDGED else kind
        pair = Pair(TargetCheckpoint(_CONFIG, self._target()), self._drafter(own), None, "small vocabulary")
        return bridged_pair(pair) if kind == BRIDGED else pair

    def _drafter(self, kind: str) -> AnyDrafter:
        if kind in _TOKEN_DRAFTERS:
            return _TOKEN_DRAFTERS[kind]
        if kind in BLOCK_KINDS:
            block = BlockConfig(4, 3)
            if kind == "dspark":
                heads = {"markov_rank": VOCAB, "confidence": "hidden_and_token", "threshold": 0.5}
                block = BlockConfig(4, 3, "next", **heads)
            make = DFlashConfig if kind == "dflash" else DSparkConfig
            config = make(_CONFIG, VOCAB, HIDDEN, (0,), block=block)
            return DrafterCheckpoint(config, _block(config, self.draft_VV))
        if kind == "mtp":
            config = MtpConfig(replace(_CONFIG, layers=2 * _CONFIG.layers), VOCAB, HIDDEN, num_modules=2)
            return DrafterCheckpoint(config, _mtp(config))
        if kind == "p-eagle":
            config = PEagleConfig(_CONFIG, VOCAB, HIDDEN, (0,), mask_token_id=VOCAB - 1)
            return DrafterCheckpoint(config, _p_eagle(config, self.draft_VV))
        if kind == "standalone":
            config = StandaloneConfig(_CONFIG, VOCAB, HIDDEN)
            return DrafterCheckpoint(config, _standalone(config, self.draft_VV))
        config = EagleConfig(_CONFIG, VOCAB, HIDDEN)
        return DrafterCheckpoint(config, _eagle(config))

    def _target(self) -> dict[str, torch.Tensor]:
        tensors = _blank(target_layout(_CONFIG))
        token = torch.arange(VOCAB)
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


def opposed(seed: int = 0) -> SmallVocabulary:
    """Make a drafter that prefers tokens of low target probability and overrates the target's best token.

    So some drafts are accepted, and uniforms decide which ones even where a filter leaves few tokens. Four kinds of
    last token and three pairs of classes make twelve distributions; each occurs often.
    """
    generator = np.random.default_rng(seed)
    last_VV = generator.normal(0, 0.9, (VOCAB, 4))[:, np.arange(VOCAB) // 4]
    draft_VV = -0.6 * last_VV
    draft_VV[last_VV.argmax(0), np.arange(VOCAB)] = draft_VV.max(0) + 1.5
    return SmallVocabulary(last_VV, generator.normal(0, 2.5, (VOCAB, CLASSES)), draft_VV)


def dyadic() -> SmallVocabulary:
    """Make distributions uniform on 2 or 4 tokens, whose float32 sums are exact in any order.

    A token is allowed where the bits of its number fit the tokens before it. The drafter knows bit 1, requires a bit 0
    that the target leaves open, and after some tokens a bit 2.
    """
    last_VV = np.zeros((VOCAB, VOCAB))
    before_VC = np.zeros((VOCAB, CLASSES))
    draft_VV = np.zeros((VOCAB, VOCAB))
    for following, last in product(range(VOCAB), repeat=2):
        bits = [following >> place & 1 for place in range(4)]
        is_wrong = bits[1] != (last >> 3 ^ last) & 1
        last_VV[following, last] = _FORBIDDEN * is_wrong
        draft_VV[following, last] = _FORBIDDEN * (is_wrong or bits[0] != last >> 1 & 1 or (bits[2] and last >> 2 & 1))
        before_VC[following, last % CLASSES] = _FORBIDDEN * bits[2 + last % CLASSES]
    return SmallVocabulary(last_VV, before_VC, draft_VV)


def _eagle(config: EagleConfig) -> dict[str, torch.Tensor]:
    """Make an fc that passes on the embedding into features where the target has 0; attention adds nothing."""
    tensors = _blank(drafter_layout(config)[0])
    token = torch.arange(VOCAB)
    tensors["embed_tokens.weight"][token, _DRAFT + token] = 1.0
    tensors["fc.weight"][:, :HIDDEN] = torch.eye(HIDDEN, dtype=torch.float64)
    return tensors


def _mtp(config: MtpConfig) -> dict[str, torch.Tensor]:
    """Make modules that pass on the last token as the EAGLE head does."""
    tensors = _blank(drafter_layout(config)[0])
    token = torch.arange(VOCAB)
    for index in range(config.num_modules):
        tensors[f"modules.{index}.eh_proj.weight"][_DRAFT + token, token] = 1.0
        tensors[f"modules.{index}.norm.weight"] *= HIDDEN**-0.5
    return tensors


def _p_eagle(config: PEagleConfig, draft_VV: np.ndarray) -> dict[str, torch.Tensor]:
    """Make a head that reads the token before the last one, and in mask rows one fixed token."""
    layout = drafter_layout(config)
    tensors = _blank({**layout.required, "lm_head.weight": layout.optional["lm_head.weight"]})
    token = torch.arange(VOCAB)
    tensors["fc.weight"][token, token] = 1.0
    tensors["mask_hidden"][VOCAB // 2] = 1.0
    tensors["lm_head.weight"][:, :VOCAB] = torch.from_numpy(draft_VV / HIDDEN**0.5)
    return tensors


def _standalone(config: StandaloneConfig, draft_VV: np.ndarray) -> dict[str, torch.Tensor]:
    """Make a model whose head reads the last token's embedding; its layer adds nothing."""
    tensors = _blank(drafter_layout(config)[0])
    token = torch.arange(VOCAB)
    tensors["model.embed_tokens.weight"][token, token] = 1.0
    tensors["lm_head.weight"][:, :VOCAB] = torch.from_numpy(draft_VV / HIDDEN**0.5)
    return tensors


def _block(config: BlockDrafterConfig, draft_VV: np.ndarray) -> dict[str, torch.Tensor]:
    """Make a block whose rows draft what the target's head reads from the mask token, whatever the text is.

    With a Markov head they draft by the token before alone, and drafts end behind every fourth token.
    """
    tensors = _blank(drafter_layout(config).required)
    if config.kind == "dspark":
        tensors["norm.weight"] *= 0.0
        tensors["markov_head.markov_w1.weight"] = torch.eye(VOCAB, dtype=torch.float64)
        tensors["markov_head.markov_w2.weight"] = torch.from_numpy(draft_VV)
        tensors["confidence_head.proj.weight"][0, HIDDEN + torch.arange(0, VOCAB, 4)] = -1.0
    return tensors


def _blank(layout: Layout) -> dict[str, torch.Tensor]:
    """Make the tensors of a layout: norms are 1, all others 0."""
    return {name: torch.full(shape, float("norm" in name), dtype=torch.float64) for name, shape in layout.items()}
