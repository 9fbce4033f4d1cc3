"""The law of what a verifier lets through, on its own random path, against the target's law of the same nodes.

Each of n requests has the same tree and logits, and draws of its own name. The joint law of the first two tokens is
known: the first has the root's law p, and one that is a child of the root is followed by one of that child's law. By
Weissman et al. (2003) a right sample of n from k values lies further than sqrt(2 (k ln 2 - ln a) / n) from its law, in
the sum of absolute differences, with a probability of at most a.
"""

import math
from collections import Counter
from importlib import import_module
from typing import Any

import torch

from specsim.config import SamplingParams, SpecConfig
from specsim.faults.fault import Finding
from specsim.phases import Batch, VerifyInput
from specsim.pool import KVBuffer, KVLayout, KVPool

FALSE_ALARM = 1e-6
VOCAB, LENGTH = 4, 4
PARENTS, TOKENS = [-1, 0, 0], [3, 1, 2]
CONFIG = SpecConfig(topk=2, num_steps=1, num_draft_tokens=3, page_size=1, max_len=64)


@torch.inference_mode()
def judge(setting: dict[str, Any], device: str) -> list[Finding]:
    """setting: impl; n, the number of requests; of every request temperature, and what else is of SamplingParams."""
    given = dict(setting)
    impl, count = given.pop("impl"), given.pop("n")
    sampling = SamplingParams(**{"temperature": 1.0, **given})
    logits_NV = torch.tensor([[0.5, 1.0, -0.5, 0.0], [0.0, 0.5, 1.0, 0.5], [1.0, 0.0, 0.5, 0.5]])
    expected = _law(logits_NV, sampling)
    seen = Counter(tuple(tokens[:2]) for tokens in _drawn(impl, count, sampling, logits_NV, device))
    distance = sum(abs(seen[each] / count - expected.get(each, 0.0)) for each in {*seen, *expected})
    allowed = math.sqrt(2 * (len(expected) * math.log(2) - math.log(FALSE_ALARM)) / count)
    if distance <= allowed:
        return []
    about = f"{count} requests, false alarms at most {FALSE_ALARM:.0e}"
    return [Finding("law", about, f"at most {allowed:.3f} from the target's", f"{distance:.3f}")]


def _law(logits_NV: torch.Tensor, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Of the first token, and of the second where the first is a child of the root."""
    from specsim.reference.sampling import target_prob

    sampling = Batch.of([0], [0], [LENGTH], [params], VOCAB).sampling
    prob_NV = [target_prob(logits_V.double(), sampling, 0) for logits_V in logits_NV]
    children = {TOKENS[node]: node for node in range(len(TOKENS)) if PARENTS[node] == 0}
    law = {(token,): float(prob_NV[0][token]) for token in range(VOCAB) if token not in children}
    for token, node in children.items():
        law |= {(token, then): float(prob_NV[0][token] * prob_NV[node][then]) for then in range(VOCAB)}
    return law


def _drawn(impl: str, count: int, params: SamplingParams, logits_NV: torch.Tensor, device: str) -> list[list[int]]:
    from specsim.reference.tree import links, visibility

    rows, num_nodes = list(range(count)), len(TOKENS)
    batch = Batch.of(rows, rows, [LENGTH] * count, [params] * count, VOCAB)
    pools = KVPool(KVBuffer(KVLayout(1, 1, 2), 1, torch.float32, device), None, 1, count, LENGTH + num_nodes + 1)
    pools.token_ids[:, : LENGTH + 1] = TOKENS[0]
    first, sibling = links(PARENTS)
    depths = torch.tensor([0, 1, 1])

    def table(row) -> torch.Tensor:
        return torch.as_tensor(row).expand(count, -1).contiguous()

    tree = VerifyInput(
        draft_tokens=table(TOKENS),
        parents=table(PARENTS),
        scores=torch.ones(count, num_nodes),
        positions=table(LENGTH + depths).flatten(),
        mask=visibility(PARENTS).expand(count, -1, -1).contiguous(),
        retrieve_index=torch.arange(count * num_nodes).view(count, -1),
        retrieve_next_token=table(first),
        retrieve_next_sibling=table(sibling),
        cache_locations=torch.zeros(count * num_nodes, dtype=torch.int64),
    )
    verify = import_module(f"specsim.{impl}.verify").verify
    logits_RV = logits_NV.repeat(count, 1).to(device)
    verdict = verify(batch.to(device), tree.to(device), logits_RV, CONFIG, pools)
    return verdict.to("cpu").accepted_tokens()
