"""The fast column's walk of trees under the public names of the verifiers."""

import math
from types import SimpleNamespace

import torch

from specsim.config import SamplingParams, SpecConfig
from specsim.phases import Batch, Verdict

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
    """Laws are made of logits: log2 p at the temperature at which 2^x is the weight of x."""
    tables, coins = (candidates, retrive_next_token, retrive_next_sibling), None
    if len(candidates):
        coins = _coins_by_depth(retrive_next_token, retrive_next_sibling, uniform_samples, accept_index.shape[1])
        coins = coins, uniform_samples_for_final_sampling
    width, logits_BNV = accept_index.shape[1], target_probs.float().contiguous().log2()
    verdict = _walk(tables, logits_BNV, math.log2(math.e), coins, width, threshold_single, threshold_acc)
    predicts.copy_(verdict.predict)
    accept_index.copy_(verdict.accept_index)
    accept_token_num.copy_(verdict.num_accepted_drafts)


def _walk(tables, logits_BNV, temperature: float, coins, width: int, single: float, acc: float) -> Verdict:
    """Walk every tree under the laws of its nodes' logits; tables: tokens, first children and next siblings."""
    from specsim.fast.penalties import Logits
    from specsim.fast.sampling import laws
    from specsim.fast.verify import walk

    batch_size, num_nodes, vocab_size = logits_BNV.shape
    logits_RV = logits_BNV.reshape(-1, vocab_size)
    params = [SamplingParams(temperature=temperature)] * batch_size
    batch = Batch.of(range(batch_size), range(batch_size), [1] * batch_size, params, vocab_size).to(logits_RV.device)
    config = SpecConfig(
        max(2, num_nodes), width - 1, num_nodes, threshold_single=single, threshold_acc=acc, max_len=_FAR
    )
    links = dict(zip(("draft_tokens", "retrieve_next_token", "retrieve_next_sibling"), tables, strict=True))
    tree = SimpleNamespace(**links)
    unchanged = torch.zeros(batch_size, dtype=torch.int32, device=logits_RV.device)
    return walk(batch, tree, laws(batch, Logits(logits_RV, unchanged, logits_RV)), coins, config)


def _coins_by_depth(next_token, next_sibling, uniform_samples, width: int) -> torch.Tensor:
    """The column has one coin a depth: that of the first node found there."""
    coins = torch.full((len(uniform_samples), width), 0.5, device=uniform_samples.device)
    for request, (children, siblings) in enumerate(zip(next_token.tolist(), next_sibling.tolist(), strict=True)):
        level = [0]
        for depth in range(width):
            if level:
                coins[request, depth] = uniform_samples[request, level[0]]
            level = [node for parent in level for node in _siblings(children[parent], siblings)]
    return coins


def _siblings(first: int, siblings: list[int]) -> list[int]:
    found = []
    while first >= 0:
        found.append(first)
        first = siblings[first]
    return found
