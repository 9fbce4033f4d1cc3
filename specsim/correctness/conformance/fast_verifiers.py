"""The fast implementation's tree walks under the public names of the verifiers."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.verifiers import VERIFIER_OF

_UNIT = math.log2(math.e)  # at this temperature a logit x has weight 2^x
_FAR = 2**31 - 1  # no-op length limit


class TreeBatch(NamedTuple):
    """Trees of a batch."""

    tokens: Tensor  # i64 [B, N]
    next_token: Tensor  # i64 [B, N], first child, -1 for none
    next_sibling: Tensor  # i64 [B, N], -1 for none


def verify_tree_greedy(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, _retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """Renumber the tokens that occur, and give all mass to the target's."""
    vocabulary, numbers = torch.cat([candidates, target_predict]).unique(return_inverse=True)
    tokens, best = numbers.view(2, *candidates.shape)
    logits_BNV = torch.nn.functional.one_hot(best, max(1, len(vocabulary))).float()
    config = _config(logits_BNV, accept_index.shape[1])
    verdict = _walk(TreeBatch(tokens, retrive_next_token, retrive_next_sibling), logits_BNV, 0.0, None, config)
    accept_index.copy_(verdict.accept_index)
    accept_token_num.copy_(verdict.num_accepted_drafts)
    if len(vocabulary):
        predicts.copy_(torch.where(verdict.predict < 0, -1, vocabulary[verdict.predict.long().clamp(min=0)]))


def tree_speculative_sampling_target_only(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, _retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor, target_probs: Tensor, _draft_probs: Tensor,
    threshold_single: float = 1.0, threshold_acc: float = 1.0, _deterministic: bool = True,
) -> None:  # fmt: skip
    """Make logits of the distributions: log2 p at the temperature _UNIT."""
    trees = TreeBatch(candidates, retrive_next_token, retrive_next_sibling)
    width = accept_index.shape[1]
    logits_BNV = target_probs.float().contiguous().log2()
    config = _config(logits_BNV, width, threshold_single, threshold_acc)

    def walked(uniforms_BW: Tensor) -> Verdict:
        uniforms = (uniforms_BW, uniform_samples_for_final_sampling) if len(candidates) else None
        return _walk(trees, logits_BNV, _UNIT, uniforms, config)

    verdict = walked(uniform_samples[:, :1].expand(-1, width).contiguous())
    for _ in range(width - 1):  # kernels read a uniform per depth: every walk makes the path right one depth further
        verdict = walked(uniform_samples.take(verdict.accept_index.long().clamp(min=0)))
    predicts.copy_(verdict.predict)
    accept_index.copy_(verdict.accept_index)
    accept_token_num.copy_(verdict.num_accepted_drafts)


def rejection_sample(
    draft_token_ids: Tensor, num_draft_tokens: list[int], max_spec_len: int, _cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None, target_probs: Tensor, bonus_token_ids: Tensor, sampling_metadata: Any,
) -> Tensor:  # fmt: skip
    """Pad all chains to the longest; a tree is as deep as its request has drafts before a placeholder.

    Uniforms are named by a seed from torch's generator.
    """
    device = target_probs.device
    vocab_size = target_probs.shape[1]
    lengths = torch.tensor(num_draft_tokens, dtype=torch.int64)
    steps = max(1, max_spec_len)
    config = SpecConfig(1, steps, steps + 1, verifier=VERIFIER_OF["sampled"], max_len=steps + 2)
    is_draft_BS = (torch.arange(steps) < lengths[:, None]).to(device)

    def padded(rows: Tensor) -> Tensor:
        padded_rows = torch.zeros(len(lengths), steps, *rows.shape[1:], dtype=rows.dtype, device=device)
        padded_rows[is_draft_BS] = rows
        return padded_rows

    drafts = draft_token_ids.long().clamp(min=0)
    draft_RV = torch.nn.functional.one_hot(drafts, vocab_size).float() if draft_probs is None else draft_probs
    depths = padded(draft_token_ids + 1).gt(0).cumprod(1).sum(1)
    tokens_BN = torch.nn.functional.pad(padded(drafts), (1, 0))
    logits_BNV = torch.nn.functional.pad(padded(target_probs.log2()), (0, 0, 0, 1))
    seed = int(torch.randint(2**63 - 1, ()))
    temperatures = torch.where(sampling_metadata.temperature > 0, _UNIT, 0.0).tolist()
    params = [SamplingParams(temperature=temperature, seed=seed) for temperature in temperatures]
    requests = range(len(lengths))
    batch = Batch.of(requests, requests, [1] * len(lengths), params, vocab_size)
    no_links = torch.full_like(tokens_BN, -1)  # a chain needs none
    tree = verify_input(TreeBatch(tokens_BN, no_links, no_links), padded(draft_RV), depths.int())
    verdict = _walk_batch(batch, tree, logits_BNV, None, config)
    output = verdict.predict.view(tokens_BN.shape)
    is_bonus_BN = (torch.arange(steps + 1, device=device) == lengths.to(device)[:, None]) & (output >= 0)
    return torch.where(is_bonus_BN, bonus_token_ids.int(), output)[:, : max_spec_len + 1]


def _config(logits_BNV: Tensor, width: int, single: float = 1.0, acc: float = 1.0) -> SpecConfig:
    num_nodes = logits_BNV.shape[1]
    return SpecConfig(max(2, num_nodes), width - 1, num_nodes, threshold_single=single, threshold_acc=acc, max_len=_FAR)


def _walk(
    trees: TreeBatch, logits_BNV: Tensor, temperature: float, uniforms: tuple[Tensor, Tensor] | None, config: SpecConfig
) -> Verdict:
    """Walk every tree under the distributions of its nodes' logits."""
    batch_size, _, vocab_size = logits_BNV.shape
    params = [SamplingParams(temperature=temperature)] * batch_size
    batch = Batch.of(range(batch_size), range(batch_size), [1] * batch_size, params, vocab_size)
    return _walk_batch(batch, verify_input(trees), logits_BNV, uniforms, config)


def _walk_batch(
    batch: Batch, tree: VerifyInput, logits_BNV: Tensor, uniforms: tuple[Tensor, Tensor] | None, config: SpecConfig
) -> Verdict:
    from specsim.fast.verify import walk
    from specsim.fast.vocabulary.penalties import Logits

    batch = batch.to(logits_BNV.device)
    return walk(batch, tree, Logits.unchanged(logits_BNV.flatten(0, 1), batch.size), uniforms, config)


def verify_input(
    trees: TreeBatch, draft_prob_BMV: Tensor | None = None, proposed_depth: Tensor | None = None
) -> VerifyInput:
    """Make the state that the kernels read, without the tensors that they do not read."""
    tokens, next_token, next_sibling = trees
    unread = tokens.new_empty(0)
    return VerifyInput(
        draft_tokens=tokens,
        parents=unread,
        scores=unread,
        positions=unread,
        mask=unread,
        retrieve_index=unread,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        cache_locations=unread,
        proposed_depth=unread if proposed_depth is None else proposed_depth,
        draft_prob=draft_prob_BMV,
    )
