"""Checks of a round: logits and first drafts by an independent forward, trees and verdict by the reference."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from specsim.bench.checks import all_of, equal, within
from specsim.bench.dense import Rows, eagle3_forward, eagle3_logits, eagle3_of, target_forward
from specsim.bench.row import Check
from specsim.bench.scene import Scene, with_graph
from specsim.bench.verify_checks import LOGPROBS, check_verdict
from specsim.core.phases import AutoregressiveInput, Candidates, DraftInput, RoundOutput, State, VerifyInput

# Bounds for our worst error and the root of its mean square, over those of plain torch in the same type, which rounds
# as often in another order.
WORST = 3.0
WHOLE = 2.0
SMALLEST = torch.finfo(torch.float32).tiny  # smaller probabilities may be 0


def check_round(scene: Scene, requests: Sequence[int] = (0,), with_eager: bool = True) -> Check:
    """Check a round by an independent forward and the reference, and its graph by the eager kernels.

    All trees are compared with the reference's trees of the same candidates, and the candidates with the drafts at the
    start of the round. For the given requests the verdict, the target's logits and the next bonus token are checked;
    with an EAGLE-3 head also the next first drafts, and after a real prefill the hidden state. Drafts of later steps
    are not checked: a wrong one only costs acceptance.
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
    found: dict[str, torch.Tensor] = {}
    names = getattr(state, "_fields", None) or [each.name for each in fields(state)]
    for each in names:
        value = getattr(state, each)
        if isinstance(value, State):
            found |= tensors_of(value, f"{name}{each}.")
        elif isinstance(value, torch.Tensor):
            found[f"{name}{each}"] = value
    return found


def _trees(scene: Scene, verify_input: VerifyInput) -> list[Check]:
    """Compare the first drafts with the candidates, and all trees with the reference's."""
    from specsim.reference import tree

    batch = scene.batch
    config = scene.engine.config
    if verify_input.candidates is None:
        raise ValueError("the engine returns no candidates")
    candidates = verify_input.candidates.to("cpu")
    given = scene.draft_input.to("cpu")
    first = {}
    began = {}
    if isinstance(given, AutoregressiveInput) and isinstance(candidates, Candidates):
        count = given.topk_index.shape[1]
        first = {"tokens": candidates.tokens[:, :count], "scores": candidates.scores[:, :count]}
        began = {"tokens": given.topk_index, "scores": given.topk_scores}
    columns = batch.seq_lens[:, None] + torch.arange(config.num_draft_tokens, device=batch.seq_lens.device)
    locations = scene.pools.req_to_token[batch.req_pool_indices[:, None], columns].cpu()
    expected = tree.build(candidates, given.bonus_tokens, batch.seq_lens.cpu(), locations, config)
    return [
        equal("the drafts that the round began with", first, began),
        equal("trees of the candidates by the reference", verify_input.tensors, expected.tensors),
    ]


def _against_dense(scene: Scene, output: RoundOutput, request: int) -> list[Check]:
    """Compare one request with plain torch: the target's logits, and the state for the next draft phase."""
    nodes = scene.engine.config.num_draft_tokens
    verify_input = output.verify_input
    own = slice(request * nodes, (request + 1) * nodes)
    length = int(scene.batch.seq_lens[request])
    ids = verify_input.draft_tokens[request]
    positions = verify_input.positions[own]
    mask = verify_input.mask[request]
    prefix = None if scene.prompts else lambda layer: _kv_of(scene, request, length, layer)
    rows = Rows.tree(length, positions, mask, with_prompt=scene.prompts is not None)
    if scene.prompts:
        ids = torch.cat([torch.tensor(scene.prompts[request], device=ids.device), ids])
    layers = scene.engine.drafter.feature_layers
    given = (nodes, prefix, layers)
    wider = _wider(scene)
    own_dtype = scene.engine.dtype
    exact, features = target_forward(scene.pair, ids, rows, wider, *given)
    rounded, rounded_features = target_forward(scene.pair, ids, rows, own_dtype, *given)
    ours = output.verify_output.target_logits[own]
    checks = [near(f"logits of request {request} by plain torch", ours, exact, rounded), _bonus_token(output, request)]
    if scene.pair.kind == "eagle3":
        checks.append(_first_drafts(scene, output, request))
        if scene.prompts and layers:
            checks.append(_hidden(scene, output, request, ids, [features, rounded_features]))
    return checks


def _bonus_token(output: RoundOutput, request: int) -> Check:
    """Compare the root of the next tree with the token after the last accepted node."""
    verdict = output.verify_output.verdict
    last = verdict.accept_index[request].max().long()  # nodes of a path are in ascending order
    found = output.draft_input.bonus_tokens[request]
    expected = verdict.predict[last]
    return equal(f"next bonus token of request {request}", {"token": found}, {"token": expected})


def _first_drafts(scene: Scene, output: RoundOutput, request: int) -> Check:
    """Compare the first drafts, by rank and score, with plain torch's logits of our hidden state.

    Two logits may each have the error that `near` allows those of the target.
    """
    compared = f"next first drafts of request {request} by plain torch"
    left = autoregressive(output.draft_input)
    tokens, scores, hidden = (each[request] for each in (left.topk_index, left.topk_scores, left.hidden))
    exact, rounded = (eagle3_logits(scene.pair, hidden, each).double() for each in (_wider(scene), hidden.dtype))
    target_ids = torch.arange(len(exact), device=tokens.device)
    d2t = eagle3_of(scene.pair).tensors.get("d2t")
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
        eagle3_forward(scene.pair, ahead, each[rows], dtype)
        for each, dtype in zip(features, (_wider(scene), scene.engine.dtype), strict=True)
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
    whole = Check(
        f"{compared}, root of the mean square", ratio / WHOLE, 1, "" if ratio <= WHOLE else f"{ratio:.2f} times"
    )
    return all_of(compared, worst, whole)
