"""Checks of a round: logits and first drafts by an independent forward, trees and verdict by the reference."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch

from specsim.bench.dense import HEAD, DenseRows, head_forward, head_logits, head_of, target_forward
from specsim.bench.row import Check, all_of, equal, within
from specsim.bench.scene import Scene, with_graph
from specsim.core.config import SpecConfig
from specsim.core.phases import (
    AutoregressiveInput,
    Batch,
    Candidates,
    DraftInput,
    RoundOutput,
    State,
    Verdict,
    VerifyInput,
)
from specsim.core.synthetic_acceptance import SyntheticAcceptance

# Bounds for our worst error and the root of its mean square, over those of plain torch in the same type, which rounds
# as often in another order.
WORST = 3.0
WHOLE = 2.0
SMALLEST = torch.finfo(torch.float32).tiny  # smaller probabilities may be 0


def check_round(scene: Scene, requests: Sequence[int] = (0,), with_eager: bool = True) -> Check:
    """Check a round by an independent forward and the reference, and its graph by the eager kernels.

    All trees are compared with the reference's trees of the same candidates, and the candidates with the drafts at the
    start of the round. For the given requests the verdict, the target's logits and the next bonus token are checked;
    with a head of kind dense.HEAD also the next first drafts, and after a real prefill the hidden state. Drafts of
    later steps are not checked: a wrong one only costs acceptance.
    """
    output = scene.round()
    verify_input = output.verify_input
    verified = output.verify_output
    pools = scene.pools
    checks = _trees(scene, verify_input)
    if with_eager:
        eager = with_graph(scene, "eager").round()
        checks.append(equal("graph and eager bit for bit", tensors_of(output), tensors_of(eager)))
    checks.append(check_verdict(
        scene.batch, verify_input, verified.target_logits, scene.engine.config, pools.token_ids, verified.verdict,
        requests, scene.engine.acceptance,
    ))  # fmt: skip
    for request in requests:
        checks += _against_dense(scene, output, request)
    return all_of("; ".join(check.compared for check in checks), *checks)


def autoregressive(draft_input: DraftInput) -> AutoregressiveInput:
    """Require the draft input of a drafter that runs a decoder in each step."""
    if not isinstance(draft_input, AutoregressiveInput):
        raise TypeError(f"a {type(draft_input).__name__} has no first drafts")
    return draft_input


def tensors_of(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Collect the tensors of a state, or of a NamedTuple of states, by their paths."""
    tensors: dict[str, torch.Tensor] = {}
    names = getattr(state, "_fields", None) or [field.name for field in fields(state)]
    for field_name in names:
        value = getattr(state, field_name)
        if isinstance(value, State):
            tensors |= tensors_of(value, f"{name}{field_name}.")
        elif isinstance(value, torch.Tensor):
            tensors[f"{name}{field_name}"] = value
    return tensors


def _trees(scene: Scene, verify_input: VerifyInput) -> list[Check]:
    """Compare the first drafts with the candidates, and all trees with the reference's."""
    from specsim.reference import tree

    batch = scene.batch
    config = scene.engine.config
    if verify_input.candidates is None:
        raise ValueError("the engine returns no candidates")
    candidates = verify_input.candidates.to("cpu")
    draft_input = scene.draft_input.to("cpu")
    first = {}
    began = {}
    if isinstance(draft_input, AutoregressiveInput) and isinstance(candidates, Candidates):
        count = draft_input.topk_index.shape[1]
        first = {"tokens": candidates.tokens[:, :count], "scores": candidates.scores[:, :count]}
        began = {"tokens": draft_input.topk_index, "scores": draft_input.topk_scores}
    columns = batch.seq_lens[:, None] + torch.arange(config.num_draft_tokens, device=batch.seq_lens.device)
    locations = scene.pools.req_to_token[batch.req_pool_indices[:, None], columns].cpu()
    expected = tree.build(candidates, draft_input.bonus_tokens, batch.seq_lens.cpu(), locations, config)
    return [
        equal("the drafts that the round began with", first, began),
        equal("trees of the candidates by the reference", verify_input.tensors, expected.tensors),
    ]


def _against_dense(scene: Scene, output: RoundOutput, request: int) -> list[Check]:
    """Compare one request with plain torch: the target's logits, and the state for the next draft phase."""
    nodes = scene.engine.config.num_draft_tokens
    verify_input = output.verify_input
    node_rows = slice(request * nodes, (request + 1) * nodes)
    length = int(scene.batch.seq_lens[request])
    ids = verify_input.draft_tokens[request]
    positions = verify_input.positions[node_rows]
    mask = verify_input.mask[request]
    prefix = None if scene.prompts else lambda layer: _kv_of(scene, request, length, layer)
    rows = DenseRows.tree(length, positions, mask, with_prompt=scene.prompts is not None)
    if scene.prompts:
        ids = torch.cat([torch.tensor(scene.prompts[request], device=ids.device), ids])
    layers = scene.engine.drafter.feature_layers
    arguments = (nodes, prefix, layers)
    wider = _wider(scene)
    dtype = scene.engine.dtype
    exact, features = target_forward(scene.pair, ids, rows, wider, *arguments)
    rounded, rounded_features = target_forward(scene.pair, ids, rows, dtype, *arguments)
    ours = output.verify_output.target_logits[node_rows]
    checks = [near(f"logits of request {request} by plain torch", ours, exact, rounded), _bonus_token(output, request)]
    if scene.pair.kind == HEAD:
        checks.append(_first_drafts(scene, output, request))
        if scene.prompts and layers:
            checks.append(_hidden(scene, output, request, ids, [features, rounded_features]))
    return checks


def _bonus_token(output: RoundOutput, request: int) -> Check:
    """Compare the root of the next tree with the token after the last accepted node."""
    verdict = output.verify_output.verdict
    last = verdict.accept_index[request].max().long()  # nodes of a path are in ascending order
    bonus_token = output.draft_input.bonus_tokens[request]
    expected = verdict.predict[last]
    return equal(f"next bonus token of request {request}", {"token": bonus_token}, {"token": expected})


def _first_drafts(scene: Scene, output: RoundOutput, request: int) -> Check:
    """Compare the first drafts, by rank and score, with plain torch's logits of our hidden state.

    Two logits may each have the error that `near` allows those of the target.
    """
    compared = f"next first drafts of request {request} by plain torch"
    draft_input = autoregressive(output.draft_input)
    tokens, scores, hidden = (
        tensor[request] for tensor in (draft_input.topk_index, draft_input.topk_scores, draft_input.hidden)
    )
    exact, rounded = (head_logits(scene.pair, hidden, dtype).double() for dtype in (_wider(scene), hidden.dtype))
    target_ids = torch.arange(len(exact), device=tokens.device)
    d2t = head_of(scene.pair).tensors.get("d2t")
    drafted = tokens[:, None] == (target_ids if d2t is None else target_ids + d2t.to(tokens.device))
    ids = drafted.int().argmax(1)
    if not drafted.any(1).all() or len(ids.unique()) < len(ids):
        return Check(compared, 1, 0, f"{tokens.tolist()}, not as many tokens of the draft vocabulary")
    budget = 2 * WORST * float((rounded - exact).abs().max())
    ranks = within(f"{compared}, ranked", exact[ids], exact.topk(len(ids)).values, budget)
    if scene.engine.config.score == "logprob":
        exact_scores = exact.log_softmax(-1)[ids]
        return all_of(
            compared, ranks, within(f"{compared}, log probabilities", scores, exact_scores, budget + LOGPROBS)
        )
    exact_prob = exact.softmax(-1)[ids]
    share = math.expm1(budget + LOGPROBS)
    return all_of(
        compared, ranks, within(f"{compared}, probabilities", scores, exact_prob, share * exact_prob + SMALLEST)
    )


def _wider(scene: Scene) -> torch.dtype:
    """Return the type that counts as exact for the engine's."""
    return torch.float64 if scene.engine.dtype == torch.float32 else torch.float32


def _kv_of(scene: Scene, request: int, length: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = scene.pools.req_to_token[scene.batch.req_pool_indices[request], :length]
    kv = scene.pools.target
    return kv.keys[layer][slots], kv.values[layer][slots]


def _hidden(scene: Scene, output: RoundOutput, request: int, ids: torch.Tensor, features: list[torch.Tensor]) -> Check:
    """Compare the drafter's hidden state after the accepted path; its ids are one place ahead of the features."""
    verdict = output.verify_output.verdict
    length = int(scene.batch.seq_lens[request])
    nodes = scene.engine.config.num_draft_tokens
    count = int(verdict.num_accepted_tokens[request])
    path = verdict.accept_index[request, :count].long() - request * nodes
    rows = torch.cat([torch.arange(length, device=ids.device), length + path])
    bonus = output.draft_input.bonus_tokens[request : request + 1].long()
    ahead = torch.cat([ids[rows][1:], bonus])
    both = [
        head_forward(scene.pair, ahead, layer_features[rows], dtype)
        for layer_features, dtype in zip(features, (_wider(scene), scene.engine.dtype), strict=True)
    ]
    return near(
        f"hidden state of request {request} by plain torch", autoregressive(output.draft_input).hidden[request], *both
    )


def near(compared: str, ours: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> Check:
    """Bound our errors by multiples of plain torch's: the worst by WORST, the root mean square by WHOLE."""
    exact = exact.double()
    error = (rounded.double() - exact).abs()
    worst = within(f"{compared}, at worst", ours, exact, WORST * float(error.max()))
    ratio = float((ours.double() - exact).square().mean().sqrt() / error.square().mean().sqrt())
    mean_square = Check(
        f"{compared}, root of the mean square", ratio / WHOLE, 1, "" if ratio <= WHOLE else f"{ratio:.2f} times"
    )
    return all_of(compared, worst, mean_square)


# A draw in float32 may fall on the other side of a boundary that the uniform hits: the most probability in between.
MOST_BETWEEN = 1e-5
LOGPROBS = 1e-4


def check_verdict(
    batch: Batch, verify_input: VerifyInput, logits_RV: torch.Tensor, config: SpecConfig, token_ids: torch.Tensor,
    verdict: Verdict, requests: Sequence[int], acceptance: SyntheticAcceptance | None = None,
) -> Check:  # fmt: skip
    """Check the verdict of the requests at these places, and the counts of every request by its own path.

    Paths are exact, nothing is off them, bonus tokens are equal except at boundaries, and logprobs are close.
    acceptance: the schedule that decided the acceptance, if one did.
    """
    from specsim.reference import verify

    nodes = config.num_draft_tokens
    chosen = torch.tensor(list(requests))
    rows = (chosen[:, None] * nodes + torch.arange(nodes)).flatten()
    read = ("draft_tokens", "parents", "retrieve_next_token", "retrieve_next_sibling", "draft_prob")
    tensors = {name: tensor for name, tensor in verify_input.tensors.items() if name in read}
    chosen_input = replace(
        verify_input, **{name: tensor[chosen.to(tensor.device)].cpu() for name, tensor in tensors.items()}
    )
    batch = batch.filter(chosen.to(logits_RV.device)).to("cpu")
    logits = logits_RV[rows.to(logits_RV.device)].cpu()
    pools: Any = SimpleNamespace(token_ids=token_ids[batch.req_pool_indices.to(token_ids.device)].cpu())
    batch = replace(batch, req_pool_indices=torch.arange(len(requests)))
    expected = verify.verify(batch, chosen_input, logits, config, pools, acceptance=acceptance)
    paths, exact_paths = (_nodes(index, nodes) for index in (verdict.accept_index.cpu()[chosen], expected.accept_index))
    checks = [equal("paths", {"path": paths}, {"path": exact_paths})]
    if checks[0].passed:
        checks.append(_counts(verdict))
        adjusted = verify.node_logits(batch, chosen_input, logits, config, pools)
        ours = verdict.predict.cpu().view(-1, nodes)[chosen], expected.predict.view(-1, nodes)
        checks += _tokens(batch, paths, adjusted, *ours, verdict.logprobs.cpu()[chosen], expected.logprobs)
    accepted = float((exact_paths >= 0).sum(1).float().mean()) - 1
    return all_of(
        f"verdicts of {len(requests)} requests ({accepted:.1f} drafts accepted) against the reference", *checks
    )


def _counts(verdict: Verdict) -> Check:
    counted = (verdict.accept_index >= 0).sum(1, dtype=torch.int32)
    ours = {"drafts": verdict.num_accepted_drafts, "tokens": verdict.num_accepted_tokens}
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
            target_prob_V = target_prob(adjusted_BNV[request, path[-1]], batch.sampling, request)
            sampled = float(batch.sampling.temperature[request]) > 0
            between = float(target_prob_V[low + 1 : high].sum()) if sampled else torch.inf
            checks.append(
                within(f"bonus token {int(ours[-1])}", torch.tensor(between), torch.tensor(0.0), MOST_BETWEEN)
            )
        logprob_pair = logprobs_BW[request, :last].double(), exact_logprobs_BW[request, :last].double()
        if last:
            checks.append(within("logprobs", *logprob_pair, LOGPROBS))
    return checks
