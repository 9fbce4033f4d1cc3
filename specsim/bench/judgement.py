"""Whether a round of a scene is right: its logits by an independent forward, its verdict by the reference's walk."""

from collections.abc import Sequence
from dataclasses import fields

import torch

from specsim.bench.dense import Rows, eagle3_forward, target_forward
from specsim.bench.gate import all_of, equal, within
from specsim.bench.row import Check
from specsim.bench.scene import Scene, with_graph
from specsim.bench.verdict import judge_verdict
from specsim.phases import RoundOutput, State

# How much further from the exact our worst error, and the root of its mean square, may be than plain torch's in the
# same type: both round as often, in another order.
WORST, WHOLE = 3.0, 2.0


def judge_round(scene: Scene, requests: Sequence[int] = (0,), with_eager: bool = True) -> Check:
    """A round against an independent forward, and its graph against the same kernels launched one by one."""
    output = scene.round()
    verify_input, verdict, pools = output.verify_input, output.verify_output, scene.pools
    judged = judge_verdict(
        scene.batch, verify_input, verdict.target_logits, scene.engine.config, pools.token_ids, verdict, requests,
        scene.options.get("acceptance"),
    )  # fmt: skip
    checks = [judged] + ([_against_eager(scene, output)] if with_eager else [])
    for request in requests:
        checks += _against_dense(scene, output, request)
    eager = "graph and eager bit for bit; " if with_eager else ""
    named = ", ".join(map(str, requests))
    return all_of(f"{eager}all that request {named} leaves against plain torch in a wider type", *checks)


def tensors_of(state: State | tuple, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a state or of several, by its path."""
    found = {}
    names = state._fields if isinstance(state, tuple) else [each.name for each in fields(state)]
    for each in names:
        value = getattr(state, each)
        if isinstance(value, State):
            found |= tensors_of(value, f"{name}{each}.")
        elif isinstance(value, torch.Tensor):
            found[f"{name}{each}"] = value
    return found


def _against_eager(scene: Scene, output: RoundOutput) -> Check:
    eager = with_graph(scene, "eager").round()
    return equal("eager", tensors_of(output), tensors_of(eager))


def _against_dense(scene: Scene, output: RoundOutput, request: int) -> list[Check]:
    """Of one request: the target's logits and, after a real prefill, the hidden state of an EAGLE-3 head."""
    nodes, verify_input = scene.engine.config.num_draft_tokens, output.verify_input
    own = slice(request * nodes, (request + 1) * nodes)
    length, ids = int(scene.batch.seq_lens[request]), verify_input.draft_tokens[request]
    positions, mask = verify_input.positions[own], verify_input.mask[request]
    prefix = None if scene.prompts else lambda layer: _kv_of(scene, request, length, layer)
    rows = Rows.tree(length, positions, mask, with_prompt=scene.prompts is not None)
    if scene.prompts:
        ids = torch.cat([torch.tensor(scene.prompts[request], device=ids.device), ids])
    layers = scene.engine.drafter.feature_layers
    given, wider, own_dtype = (nodes, prefix, layers), _wider(scene), scene.engine.dtype
    exact, features = target_forward(scene.pair, ids, rows, wider, *given)
    rounded, rounded_features = target_forward(scene.pair, ids, rows, own_dtype, *given)
    ours = output.verify_output.target_logits[own]
    checks = [near(f"logits of request {request}", ours, exact, rounded)]
    if scene.prompts and scene.pair.drafter and scene.pair.drafter.config.kind == "eagle3" and layers:
        checks.append(_hidden(scene, output, request, ids, [features, rounded_features]))
    return checks


def _wider(scene: Scene) -> torch.dtype:
    """What is exact beside the engine's type."""
    return torch.float64 if scene.engine.dtype == torch.float32 else torch.float32


def _kv_of(scene: Scene, request: int, length: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = scene.pools.req_to_token[scene.batch.req_pool_indices[request], :length]
    kv = scene.pools.target
    return kv.keys[layer][slots], kv.values[layer][slots]


def _hidden(scene: Scene, output: RoundOutput, request: int, ids: torch.Tensor, features) -> Check:
    """The drafter's hidden state after the accepted path: ids one place ahead of the features."""
    verdict, length = output.verify_output, int(scene.batch.seq_lens[request])
    nodes, count = scene.engine.config.num_draft_tokens, int(verdict.num_accepted_tokens[request])
    path = verdict.accept_index[request, :count].long() - request * nodes
    rows = torch.cat([torch.arange(length, device=ids.device), length + path])
    bonus = output.draft_input.bonus_tokens[request : request + 1].long()
    ahead = torch.cat([ids[rows][1:], bonus])
    both = [
        eagle3_forward(scene.pair, ahead, each[rows], dtype)
        for each, dtype in zip(features, (_wider(scene), scene.engine.dtype), strict=True)
    ]
    return near(f"hidden state of request {request}", output.draft_input.hidden[request], *both)


def near(what: str, ours: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> Check:
    """Our errors within WORST and WHOLE times those of plain torch in the same type, at its worst and on the whole."""
    exact = exact.double()
    error = (rounded.double() - exact).abs()
    worst = within(f"{what}, at worst", ours, exact, WORST * float(error.max()))
    ratio = float((ours.double() - exact).square().mean().sqrt() / error.square().mean().sqrt())
    whole = Check(f"{what}, root of the mean square", ratio / WHOLE, 1, "" if ratio <= WHOLE else f"{ratio:.2f} times")
    return all_of(what, worst, whole)
