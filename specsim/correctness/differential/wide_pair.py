"""Pairs for 16-bit arithmetic: attention decides which token comes next, and no decision lies within rounding error.

A hidden state has three parts. CODE holds ±1: the Hadamard code of the token. CONTEXT holds the codes that attention
fetched from the tokens before it. SOFT holds ordinary numbers, made by other heads and the MLP. The head reads only
CODE and CONTEXT. Rounding scales all their entries alike, so logits keep their distances: those of the tokens in their
ladder, and those of sums along the paths of a tree. SOFT reaches the KV and the hidden states of the next layer, where
a wrong scale shows.
"""

from dataclasses import replace

import torch

from specsim.core.kinds import TESTED, resolve
from specsim.core.pair import Pair, TargetCheckpoint
from specsim.models.other_vocabulary import with_vocabulary_of
from specsim.models.synthetic.wide_weights import SHAPE, language_model
from specsim.models.tiny_config import tiny_config


def wide_pair(kind: str, family: str = "llama", window: int | None = None, seed: int = 0) -> Pair:
    """Make a pair of this kind of drafter, or variant of one, on a target of this family, in float64.

    kind: one with weights.
    """
    record = TESTED[kind]
    generator = torch.Generator().manual_seed(seed)
    config = tiny_config(family, 2, window=window, **SHAPE)
    target = TargetCheckpoint(config, language_model(config, generator))
    fields = record.variant(kind).fields
    model = tiny_config(family, 1, window=window, **SHAPE)
    drafter = resolve(record.synthetic).wide(model, target, generator, fields)
    drafter = replace(drafter, config=replace(drafter.config, **fields))
    return with_vocabulary_of(kind, Pair(target, drafter, tokenizer=None, name=f"wide {kind} on {family}"))
