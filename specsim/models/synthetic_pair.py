"""Synthetic pairs: a small random target, and a drafter whose noise sets how often it agrees.

The embedding of the target's last token dominates its residual stream, so its next token depends mostly on that token.
The drafter copies the same embedding and reads it through the same head. So it proposes the same token, unless its
noise or the context that it does not model changes the decision. A language model may get another vocabulary than its
target's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from specsim.core.errors import require_choice
from specsim.core.kinds import DEFAULT, TESTED
from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.core.token_drafter import SuffixConfig
from specsim.core.verifiers import resolve
from specsim.models.checkpoint.layout import target_layout
from specsim.models.checkpoint.vocabulary import bridge
from specsim.models.draft_limits import DraftWindow, limit_drafts
from specsim.models.synthetic.weights import random_weights
from specsim.models.tiny_config import tiny_config

_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_MISSING = 8  # one token in 8 of the target has no counterpart
_MORE = 5  # tokens that the target does not have


class OtherVocabulary(NamedTuple):
    """A language model with token ids of its own."""

    drafter: DrafterCheckpoint
    pairs: torch.Tensor  # i64 [M, 2], target and draft id of every common token, by ascending target id
    stand_in: int  # draft id in place of the target's other tokens


def other_vocabulary(pair: Pair, seed: int = 0) -> OtherVocabulary:
    """Move the tokens of a pair's language model to random ids, without some of them and with random new ones."""
    drafter = pair.checkpoint
    assert drafter is not None
    generator = torch.Generator().manual_seed(seed)
    target_ids_V = torch.arange(pair.target.config.vocab_size)
    common_M = target_ids_V[target_ids_V % _MISSING != _MISSING // 2]
    ids = torch.randperm(len(common_M) + _MORE, generator=generator)
    draft_ids_M = ids[_MORE:]
    tensors = dict(drafter.tensors)
    for name in _TABLES:
        table = tensors[name]
        rows = (
            torch.randn(len(ids), table.shape[1], generator=generator, dtype=torch.float64).to(table.dtype)
            * table.std()
        )
        tensors[name] = rows.index_copy(0, draft_ids_M, table[common_M])
    model = replace(drafter.config.model, vocab_size=len(ids))
    config = replace(drafter.config, model=model, draft_vocab_size=len(ids))
    return OtherVocabulary(DrafterCheckpoint(config, tensors), torch.stack([common_M, draft_ids_M], 1), int(ids[0]))


def bridged_pair(pair: Pair, seed: int = 0) -> Pair:
    """Give a pair's language model another vocabulary, and bridge it to the target's."""
    other = other_vocabulary(pair, seed)
    return replace(pair, drafter=bridge(other.drafter, pair.target.config, other.pairs, other.stand_in))


def cut_pair(pair: Pair) -> Pair:
    """Let a pair's drafter draft two tokens of three."""
    vocab_size = pair.target.config.vocab_size
    return limit_drafts(pair, [token for token in range(vocab_size) if token % 3 != 1])


def windowed_pair(pair: Pair) -> Pair:
    """Let a pair's drafter see its last five keys, and the first two of the request."""
    return limit_drafts(pair, draft_window=DraftWindow(5, first_columns=2))


def pair_with_lookup(pair: Pair) -> Pair:
    """Look up drafts next to a pair's drafter, after any token that occurred before."""
    return replace(pair, lookup=SuffixConfig(shared=False), name=f"{pair.name}+suffix")


def as_variant(name: str, pair: Pair) -> Pair:
    """Change a pair as the variant of this name does."""
    change = TESTED[name].variant(name).change
    return resolve(change)(pair) if change else pair


# Llama 3.1's rotary scaling, for contexts as short as these pairs'.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_target(config: ModelConfig, seed: int = 0, context: float = 0.1, sharpness: float = 0.5) -> TargetCheckpoint:
    """Make random weights of any family.

    context: scale of the layers' weights, against embeddings whose entries are ±1. sharpness: scale of the head.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = random_weights(target_layout(config), context, generator)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].sign()
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    tensors["lm_head.weight"] *= sharpness / context
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return TargetCheckpoint(config, tensors)


def synthetic_pair(
    kind: str = DEFAULT,
    family: str = "llama",
    *,
    seed: int = 0,
    noise: float = 0.02,
    num_layers: int = 2,
    fields: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Pair:
    """Make a pair without a tokenizer, whose first draft is accepted about 4 times in 10 at temperature 1.

    kind: of the drafter, or a variant of one; specsim.models.synthetic has their shapes. noise:
    more of it means less agreement. fields: other fields of DrafterConfig. changes: arguments of tiny_config.
    """
    require_choice("kind", kind, tuple(name for name, record in TESTED.items() if record.has_weights))
    synthetic = resolve(TESTED[kind].synthetic)
    target = random_target(tiny_config(family, num_layers, **changes), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    changed = {**TESTED[kind].variant(kind).fields, **(fields or {})}
    config = replace(synthetic.config(target.config, changed), **changed)
    drafter = DrafterCheckpoint(config, synthetic.weights(config, target, noise, generator))
    name = f"synthetic {kind} on {family}"
    return as_variant(kind, Pair(target=target, drafter=drafter, tokenizer=None, name=name))
