"""Checks of verdicts: comparison with the reference's, from the same logits, in float64 on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from specsim.bench.checks import all_of, equal, within
from specsim.bench.row import Check
from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.synthetic_acceptance import SyntheticAcceptance

# A draw in float32 may fall on the other side of a boundary that the uniform hits: the most probability in between.
MOST_BETWEEN = 1e-5
LOGPROBS = 1e-4


def check_verdict(
    batch: Batch, verify_input: VerifyInput, logits_RV: torch.Tensor, config: SpecConfig, token_ids: torch.Tensor,
    found: Verdict, places: Sequence[int], acceptance: SyntheticAcceptance | None = None,
) -> Check:  # fmt: skip
    """Check the verdict of the requests at these places, and the counts of every request by its own path.

    Paths are exact, nothing is off them, bonus tokens are equal except at boundaries, and logprobs are close.
    acceptance: the schedule that decided the acceptance, if one did.
    """
    from specsim.reference import verify

    nodes = config.num_draft_tokens
    chosen = torch.tensor(list(places))
    rows = (chosen[:, None] * nodes + torch.arange(nodes)).flatten()
    read = ("draft_tokens", "parents", "retrieve_next_token", "retrieve_next_sibling", "draft_prob")
    whole = {name: tensor for name, tensor in verify_input.tensors.items() if name in read}
    own = replace(verify_input, **{name: each[chosen.to(each.device)].cpu() for name, each in whole.items()})
    batch = batch.filter(chosen.to(logits_RV.device)).to("cpu")
    logits = logits_RV[rows.to(logits_RV.device)].cpu()
    pools: Any = SimpleNamespace(token_ids=token_ids[batch.req_pool_indices.to(token_ids.device)].cpu())
    batch = replace(batch, req_pool_indices=torch.arange(len(places)))
    expected = verify.verify(batch, own, logits, config, pools, acceptance=acceptance)
    paths, exact_paths = (_nodes(each, nodes) for each in (found.accept_index.cpu()[chosen], expected.accept_index))
    checks = [equal("paths", {"path": paths}, {"path": exact_paths})]
    if checks[0].passed:
        checks.append(_counts(found))
        adjusted = verify.node_logits(batch, own, logits, config, pools)
        ours = found.predict.cpu().view(-1, nodes)[chosen], expected.predict.view(-1, nodes)
        checks += _tokens(batch, paths, adjusted, *ours, found.logprobs.cpu()[chosen], expected.logprobs)
    accepted = float((exact_paths >= 0).sum(1).float().mean()) - 1
    return all_of(f"verdicts of {len(places)} requests ({accepted:.1f} drafts accepted) against the reference", *checks)


def _counts(found: Verdict) -> Check:
    counted = (found.accept_index >= 0).sum(1, dtype=torch.int32)
    ours = {"drafts": found.num_accepted_drafts, "tokens": found.num_accepted_tokens}
    return equal("counts of accepted", ours, {"drafts": counted - 1, "tokens": counted})


def _nodes(accept_index: torch.Tensor, nodes: int) -> torch.Tensor:
    """Convert to node indices within each tree, -1 for none."""
    return torch.where(accept_index >= 0, accept_index % nodes, -1).int()


def _tokens(
    batch: Batch,
    paths: torch.Tensor,
    adjusted_BNV: torch.Tensor,
    ours_BN: torch.Tensor,
    exact_BN: torch.Tensor,
    logprobs_BW: torch.Tensor,
    exact_logprobs_BW: torch.Tensor,
) -> list[Check]:
    """Check the tokens along the paths, whose last may be sampled, and the logprobs of equal tokens."""
    from specsim.reference.sampling import target_prob

    off = ours_BN[exact_BN < 0]
    past = logprobs_BW[paths < 0]
    checks = [
        equal("tokens off the paths", {"tokens": off}, {"tokens": torch.full_like(off, -1)}),
        equal("logprobs past the paths", {"logprobs": past}, {"logprobs": torch.zeros_like(past)}),
    ]
    for request, path in enumerate(paths):
        path = path[path >= 0].long()
        ours = ours_BN[request, path]
        exact = exact_BN[request, path]
        checks.append(equal("accepted tokens", {"tokens": ours[:-1]}, {"tokens": exact[:-1]}))
        low, high = sorted((int(ours[-1]), int(exact[-1])))
        last = len(path) if low == high else len(path) - 1
        if low != high:
            law = target_prob(adjusted_BNV[request, path[-1]], batch.sampling, request)
            sampled = float(batch.sampling.temperature[request]) > 0
            between = float(law[low + 1 : high].sum()) if sampled else torch.inf
            checks.append(
                within(f"bonus token {int(ours[-1])}", torch.tensor(between), torch.tensor(0.0), MOST_BETWEEN)
            )
        found = logprobs_BW[request, :last].double(), exact_logprobs_BW[request, :last].double()
        if last:
            checks.append(within("logprobs", *found, LOGPROBS))
    return checks
