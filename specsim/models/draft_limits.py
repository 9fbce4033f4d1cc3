"""Limits of a loaded drafter: fewer tokens that it drafts from, and fewer keys that it sees.

Neither changes the output: verification reads the distribution that drafts were drawn from, whatever it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError, require
from specsim.core.kinds import KINDS
from specsim.core.limits import TokenCount
from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.models.checkpoint.drafter_format import format_of
from specsim.models.draft_vocabulary import DraftVocabulary

_HEAD = "lm_head.weight"
VocabularySource = DraftVocabulary | Sequence[int] | str | Path


@check_arguments
@dataclass(frozen=True, slots=True)
class DraftWindow:
    """Keys that a drafter's queries see: the last ones, and the first ones of the request besides.

    Each key keeps its position and its rotation. SGLang: `--speculative-draft-window-size`,
    `--speculative-draft-sink-size`.
    """

    size: TokenCount  # last keys, the query's own included
    first_columns: int = 0  # of the request

    def __post_init__(self) -> None:
        require(self.first_columns >= 0, "first_columns", self.first_columns, "at least 0")


@check_arguments
def limit_drafts(
    pair: Pair, draft_vocab: VocabularySource | None = None, draft_window: DraftWindow | TokenCount | None = None
) -> Pair:
    """Cut a pair's drafter to fewer tokens, to a window, or both; None: it stays as it is.

    draft_vocab: a DraftVocabulary, ids, or a file of them. draft_window: a DraftWindow, or its size. Raises InputError
    for a drafter without a head, or without KV of its own.
    """
    if draft_vocab is not None:
        pair = _with_fewer_tokens(pair, DraftVocabulary.of(draft_vocab))
    if draft_window is not None:
        pair = _in_window(pair, DraftWindow(draft_window) if isinstance(draft_window, int) else draft_window)
    return pair


def _with_fewer_tokens(pair: Pair, vocabulary: DraftVocabulary) -> Pair:
    drafter = pair.checkpoint
    if drafter is None:
        count = f"{len(vocabulary.token_ids)} token ids"
        raise InputError("draft_vocab", count, f"none with drafter {pair.kind}, which has no head")
    vocabulary.check(pair.target.config.vocab_size, pair.tokenizer)
    cut = cut_head(drafter, pair.target, torch.tensor(vocabulary.token_ids))
    return replace(pair, drafter=cut, name=f"{pair.name}, {cut.config.draft_vocab_size} draft tokens")


def cut_head(drafter: DrafterCheckpoint, target: TargetCheckpoint, token_ids_M: torch.Tensor) -> DrafterCheckpoint:
    """Keep the rows of a drafter's head for some target ids, i64 [M].

    A drafter that reads out by the target's head gets copies of its rows. Where the head has a draft vocabulary, the
    ids are those of both. q(i) = exp(z_i) / Σ_j exp(z_j) over these ids, with the logits z of the whole head. Raises
    InputError where none of the ids is left.
    """
    tensors = dict(drafter.tensors)
    head_VH = tensors.get(_HEAD, target.tensors[_HEAD])
    target_ids_V = torch.arange(len(head_VH)) + tensors.get("d2t", torch.zeros(len(head_VH), dtype=torch.int64))
    rows_M = torch.isin(target_ids_V, token_ids_M).nonzero().flatten()
    allowed = "some of the tokens that the drafter has rows for"
    require(len(rows_M), "draft_vocab", f"{len(token_ids_M)} token ids", allowed)
    tensors[_HEAD] = head_VH
    for name in format_of(drafter.config.kind).draft_rows:
        if name in tensors:
            tensors[name] = tensors[name][rows_M.to(tensors[name].device)]
    target_ids_M = target_ids_V[rows_M]
    tensors["d2t"] = target_ids_M - torch.arange(len(rows_M))
    vocab_size = target.config.vocab_size
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, target_ids_M, True)
    model = replace(drafter.config.model, tie_word_embeddings=False)
    return replace(drafter, config=replace(drafter.config, model=model, draft_vocab_size=len(rows_M)), tensors=tensors)


def _in_window(pair: Pair, window: DraftWindow) -> Pair:
    """Narrow every layer of a drafter that sees more; a narrower window of its own stays as it is."""
    drafter = pair.checkpoint
    if drafter is None or KINDS[drafter.config.kind].kv != "own":
        raise InputError("draft_window", window.size, f"none with drafter {pair.kind}, which has no KV of its own")
    model = drafter.config.model.narrowed(window.size, window.first_columns)
    config = replace(drafter.config, model=model)
    return replace(pair, drafter=replace(drafter, config=config), name=f"{pair.name}, draft window {window.size}")
