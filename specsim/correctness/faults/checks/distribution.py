"""Comparison of a verifier's tokens with the target's distribution at the same nodes.

Each of n requests has the same tree and logits, and uniforms under its own name. The joint distribution of the first
two tokens is known. The first has the root's distribution p; if it is a child of the root, the second has that child's
distribution. Sampled drafts come from a distribution opposed to the target's; then only the first token is compared. By
Weissman et al. (2003), the sum of absolute differences between a correct sample of n from k values and its distribution
exceeds sqrt(2 (k ln 2 - ln a) / n) with a probability of at most a.
"""

import math
from collections import Counter
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.verifiers import DEFAULT_VERIFIER, KIND_OF
from specsim.correctness.faults.fault import FaultFinding

FALSE_ALARM = 1e-6
VOCAB = 4
LENGTH = 4
PARENTS = [-1, 0, 0]
TOKENS = [3, 1, 2]
LOGITS = [[0.5, 1.0, -0.5, 0.0], [0.0, 0.5, 1.0, 0.5], [1.0, 0.0, 0.5, 0.5]]


@torch.inference_mode()
def check(setting: dict[str, Any], device: str) -> list[FaultFinding]:
    """Compare the tokens of n requests with their distribution.

    setting: impl; n, the number of requests; verifier; of every request temperature and other SamplingParams. device:
    of the fast implementation.
    """
    parameters = dict(setting)
    impl = parameters.pop("impl")
    count = parameters.pop("n")
    verifier = parameters.pop("verifier", DEFAULT_VERIFIER)
    device = device if impl == "fast" else "cpu"
    config = _config(verifier)
    sampling = SamplingParams(**{"temperature": 1.0, **parameters})
    expected = _distribution(sampling, config)
    length = 1 if config.is_sampled else 2
    seen = Counter(tuple(tokens[:length]) for tokens in _drawn(impl, count, sampling, config, device))
    distance = sum(abs(seen[tokens] / count - expected.get(tokens, 0.0)) for tokens in {*seen, *expected})
    allowed = math.sqrt(2 * (len(expected) * math.log(2) - math.log(FALSE_ALARM)) / count)
    if distance <= allowed:
        return []
    about = f"{count} requests, false alarms at most {FALSE_ALARM:.0e}"
    return [FaultFinding("distribution", about, f"at most {allowed:.3f} from the target's", f"{distance:.3f}")]


def _config(verifier: str) -> SpecConfig:
    """Make a setting of one step with two children, or with one where drafts are sampled."""
    topk = 1 if KIND_OF[verifier].drafts == "sampled" else 2
    return replace(SpecConfig(topk, 1, topk + 1, page_size=1, max_len=64), verifier=verifier)


def _distribution(params: SamplingParams, config: SpecConfig) -> dict[tuple[int, ...], float]:
    """Compute the probabilities of the first token and, after a deterministic child of the root, the second."""
    from specsim.reference.sampling import target_prob

    sampling = Batch.of([0], [0], [LENGTH], [params], VOCAB).sampling
    prob_NV = [target_prob(torch.tensor(logits).double(), sampling, 0) for logits in LOGITS]
    if config.is_sampled:
        return {(token,): float(prob_NV[0][token]) for token in range(VOCAB)}
    children = {TOKENS[node]: node for node in range(len(TOKENS)) if PARENTS[node] == 0}
    prob = {(token,): float(prob_NV[0][token]) for token in range(VOCAB) if token not in children}
    for token, node in children.items():
        prob |= {(token, then): float(prob_NV[0][token] * prob_NV[node][then]) for then in range(VOCAB)}
    return prob


def _sampled(batch: Batch, config: SpecConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw drafts i64 [B, K] from a distribution f32 [B, 1, V] opposed to the target's."""
    from specsim.reference.drafting import Parents, draft

    logits_BV = -torch.tensor(LOGITS[0]).expand(batch.size, -1)
    drafts = draft(batch, Parents(logits_BV, batch.seq_lens, 0), config.topk, None, config, VOCAB)
    return drafts.topk_index, None if drafts.draft_prob is None else drafts.draft_prob[:, None]


def _drawn(impl: str, count: int, params: SamplingParams, config: SpecConfig, device: str) -> list[list[int]]:
    from specsim.reference.tree import lay_out

    num_nodes = config.num_draft_tokens
    batch = Batch.of(range(count), range(count), [LENGTH] * count, [params] * count, VOCAB)
    pools = KVPool(KVBuffer(KVLayout(1, 1, 2), 1, torch.float32, device), None, 1, count, LENGTH + num_nodes + 1)
    pools.token_ids[:, : LENGTH + 1] = TOKENS[0]
    tokens_BN = torch.tensor(TOKENS[:num_nodes]).repeat(count, 1)
    draft_prob = None
    if config.is_sampled:
        tokens_BN[:, 1:], draft_prob = _sampled(batch, config)
    roots = (tokens_BN[:, 0], batch.seq_lens, torch.zeros_like(tokens_BN))
    scores_BN = torch.ones(count, num_nodes - 1)
    tree = replace(
        lay_out([PARENTS[:num_nodes]] * count, tokens_BN[:, 1:], scores_BN, roots, config), draft_prob=draft_prob
    )
    verify = import_module(f"specsim.{impl}.verify").verify
    logits_RV = torch.tensor(LOGITS[:num_nodes]).repeat(count, 1).to(device)
    verdict = verify(batch.to(device), tree.to(device), logits_RV, config, pools)
    return verdict.to("cpu").accepted_tokens()
