"""Synthetic language models whose vocabulary is not their target's, as drafters."""

from dataclasses import replace
from typing import NamedTuple

import torch

from specsim.core.kinds import TESTED
from specsim.core.pair import DrafterCheckpoint, Pair
from specsim.models.checkpoint.bridge import bridge

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
        own = tensors[name]
        rows = torch.randn(len(ids), own.shape[1], generator=generator, dtype=torch.float64).to(own.dtype) * own.std()
        tensors[name] = rows.index_copy(0, draft_ids_M, own[common_M])
    model = replace(drafter.config.model, vocab_size=len(ids))
    config = replace(drafter.config, model=model, draft_vocab_size=len(ids))
    return OtherVocabulary(DrafterCheckpoint(config, tensors), torch.stack([common_M, draft_ids_M], 1), int(ids[0]))


def bridged_pair(pair: Pair, seed: int = 0) -> Pair:
    """Give a pair's language model another vocabulary, and bridge it to the target's."""
    other = other_vocabulary(pair, seed)
    return replace(pair, drafter=bridge(other.drafter, pair.target.config, other.pairs, other.stand_in))


def with_vocabulary_of(name: str, pair: Pair) -> Pair:
    """Bridge a pair's language model to the target if the variant of this name has another vocabulary."""
    return bridged_pair(pair) if TESTED[name].variant(name).differs_in == "vocabulary" else pair
