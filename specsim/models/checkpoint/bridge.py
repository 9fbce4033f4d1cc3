"""Bridge between two vocabularies: a language model drafts tokens that its target has too (arXiv 2502.05202, TLI)."""

from dataclasses import replace
from pathlib import Path

import torch

from specsim.core.errors import InputError, require
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.tokenizer import LazyTokenizer, has_tokenizer
from specsim.models.checkpoint.vocabulary import vocabulary_map

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def bridge_vocabularies(
    drafter: DrafterCheckpoint, draft_folder: Path, target: ModelConfig, target_folder: Path
) -> DrafterCheckpoint:
    """Bridge to the target's vocabulary, by the tokenizers of both folders.

    The drafter reads its unknown token, or its token 0 if it has none, in place of a token that it does not have.
    Raises InputError where a folder has no tokenizer, or the two have no token in common.
    """
    for folder in (target_folder, draft_folder):
        allowed = f"True where both models have a tokenizer, and there is none in {folder}"
        require(has_tokenizer(folder), "bridge_vocabularies", True, allowed)
    tokenizer = LazyTokenizer(draft_folder)
    pairs = vocabulary_map(LazyTokenizer(target_folder), tokenizer)
    size = drafter.config.model.vocab_size
    pairs = pairs[(pairs < torch.tensor([target.vocab_size, size])).all(1)]
    if not len(pairs):
        name = f"the number of tokens that {draft_folder} and {target_folder} have in common"
        raise InputError(name, 0, "at least 1, for a bridge of their vocabularies")
    unknown = tokenizer.unk_token_id
    return bridge(drafter, target, pairs, unknown if unknown is not None and unknown < size else 0)


def bridge(drafter: DrafterCheckpoint, target: ModelConfig, pairs: torch.Tensor, stand_in: int) -> DrafterCheckpoint:
    """Give a language model the ids of its target.

    pairs: i64 [M, 2], target and draft id of every common token, by ascending target id.
    The embedding gets a row for each target id: that of the same token, or of draft id `stand_in` if there is none.
    The head keeps the rows of the M common tokens, and their softmax is the distribution that drafts are drawn from.
    """
    target_ids_M, draft_ids_M = pairs.unbind(1)
    rows_V = torch.full((target.vocab_size,), stand_in).index_put((target_ids_M,), draft_ids_M)
    tensors = {
        **drafter.tensors,
        _EMBEDDING: drafter.tensors[_EMBEDDING][rows_V],
        _HEAD: drafter.tensors[_HEAD][draft_ids_M],
        "d2t": target_ids_M - torch.arange(len(pairs)),
        "t2d": torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, target_ids_M, True),
    }
    model = replace(
        drafter.config.model,
        vocab_size=target.vocab_size,
        tie_word_embeddings=False,
        eos_token_ids=target.eos_token_ids,
    )
    return DrafterCheckpoint(replace(drafter.config, model=model, draft_vocab_size=len(pairs)), tensors)
