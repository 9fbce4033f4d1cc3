"""The fast column's walk of trees under the public names of the verifiers."""

import math
from types import SimpleNamespace

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch, Verdict

_UNIT = math.log2(math.e)  # the temperature at which 2^x is the weight of a logit x
_FAR = 2**31 - 1  # a length limit that nothing reaches


def verify_tree_greedy(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Tokens are numbered anew, so that a law over those that occur puts all its mass on the target's."""
    known, numbers = torch.cat([candidates, target_predict]).unique(return_inverse=True)
    tokens, best = numbers.view(2, *candidates.shape)
    logits_BNV = torch.nn.functional.one_hot(best, max(1, len(known))).float()
    tables = tokens, retrive_next_token, retrive_next_sibling
    verdict = _walk(tables, logits_BNV, 0.0, None, accept_index.shape[1], 1.0, 1.0)
    accept_index.copy_(verdict.accept_index)
    accept_token_num.copy_(verdict.num_accepted_drafts)
    if len(known):
        predicts.copy_(torch.where(verdict.predict < 0, -1, known[verdict.predict.long().clamp(min=0)]))


def tree_speculative_sampling_target_only(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single=1.0,
    threshold_acc=1.0, deterministic=True,
):  # fmt: skip
    """Laws are made of logits: log2 p at the temperature _UNIT."""
    tables, uniforms = (candidates, retrive_next_token, retrive_next_sibling), None
    if len(candidates):
        uniforms = _uniforms_by_depth(retrive_next_token, retrive_next_sibling, uniform_samples, accept_index.shape[1])
        uniforms = uniforms, uniform_samples_for_final_sampling
    width, logits_BNV = accept_index.shape[1], target_probs.float().contiguous().log2()
    verdict = _walk(tables, logits_BNV, _UNIT, uniforms, width, threshold_single, threshold_acc)
    predicts.copy_(verdict.predict)
    accept_index.copy_(verdict.accept_index)
    accept_token_num.copy_(verdict.num_accepted_drafts)


def rejection_sample(
    draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_probs, bonus_token_ids,
    sampling_metadata,
):  # fmt: skip
    """All chains are as long as the longest, and a request's length limit lets it accept its own drafts only. Uniforms
    are named by a seed from torch's generator.
    """
    lengths, device = torch.tensor(num_draft_tokens, dtype=torch.int64), target_probs.device
    steps, (_, vocab_size), drafts = max(1, max_spec_len), target_probs.shape, draft_token_ids.long()
    config = SpecConfig(1, steps, steps + 1, verifier="rejection", max_len=steps + 2)
    is_draft_BS = (torch.arange(steps) < lengths[:, None]).to(device)

    def padded(rows: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(len(lengths), steps, *rows.shape[1:], dtype=rows.dtype, device=device)
        whole[is_draft_BS] = rows
        return whole

    laws_RV = torch.nn.functional.one_hot(drafts, vocab_size).float() if draft_probs is None else draft_probs
    tokens_BN = torch.nn.functional.pad(padded(drafts), (1, 0))
    logits_BNV = torch.nn.functional.pad(padded(target_probs.log2()), (0, 0, 0, 1))
    seed = int(torch.randint(2**63 - 1, ()))
    warmths = torch.where(sampling_metadata.temperature > 0, _UNIT, 0.0).tolist()
    params = [SamplingParams(temperature=warmth, seed=seed) for warmth in warmths]
    every, ends = range(len(lengths)), (steps + 1 - lengths).tolist()
    links = 2 * [torch.full_like(tokens_BN, -1)]  # a chain is known to be one
    batch = Batch.of(every, every, ends, params, vocab_size)
    verdict = _under_laws(batch, (tokens_BN, *links), padded(laws_RV), logits_BNV, None, config)
    output, lengths = verdict.predict.view(tokens_BN.shape), lengths.to(device)
    is_bonus_BN = (torch.arange(steps + 1, device=device) == lengths[:, None]) & (output >= 0)
    return torch.where(is_bonus_BN, bonus_token_ids.int(), output)[:, : max_spec_len + 1]


def _walk(tables, logits_BNV, temperature: float, uniforms, width: int, single: float, acc: float) -> Verdict:
    """Walk every tree under the laws of its nodes' logits; tables: tokens, first children and next siblings."""
    batch_size, num_nodes, vocab_size = logits_BNV.shape
    params = [SamplingParams(temperature=temperature)] * batch_size
    batch = Batch.of(range(batch_size), range(batch_size), [1] * batch_size, params, vocab_size)
    config = SpecConfig(
        max(2, num_nodes), width - 1, num_nodes, threshold_single=single, threshold_acc=acc, max_len=_FAR
    )
    return _under_laws(batch, tables, None, logits_BNV, uniforms, config)


def _under_laws(batch: Batch, tables, draft_prob_BMV, logits_BNV, uniforms, config: SpecConfig) -> Verdict:
    """tables: tokens, first children and next siblings of every tree."""
    from specsim.fast.sampling import laws
    from specsim.fast.verify import walk
    from specsim.fast.vocabulary.penalties import Logits

    batch, (tokens, next_token, next_sibling) = batch.to(logits_BNV.device), tables
    tree = SimpleNamespace(
        draft_tokens=tokens,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        draft_prob=draft_prob_BMV,
    )
    return walk(batch, tree, laws(batch, Logits.unchanged(logits_BNV.flatten(0, 1), batch.size)), uniforms, config)


def _uniforms_by_depth(next_token, next_sibling, uniform_samples, width: int) -> torch.Tensor:
    """The column has one uniform a depth: that of the first node found there."""
    uniforms = torch.full((len(uniform_samples), width), 0.5, device=uniform_samples.device)
    for request, (children, siblings) in enumerate(zip(next_token.tolist(), next_sibling.tolist(), strict=True)):
        level = [0]
        for depth in range(width):
            if level:
                uniforms[request, depth] = uniform_samples[request, level[0]]
            level = [node for parent in level for node in _siblings(children[parent], siblings)]
    return uniforms


def _siblings(first: int, siblings: list[int]) -> list[int]:
    found = []
    while first >= 0:
        found.append(first)
        first = siblings[first]
    return found
