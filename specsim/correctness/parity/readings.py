"""Wrong readings of a checkpoint, each as the drafter's input that would make an engine's tensors."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import Any

import torch

from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import HeadAttention, ModelConfig, Rope
from specsim.correctness.parity.trace import DrafterInput, PrefillScene, Rows

_MOST_ORDERED = 3  # features whose every order is tried
_THETAS = (10_000.0, 500_000.0, 1_000_000.0)
_EXCHANGED = (("k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_norm", "k_norm"))


@dataclass(frozen=True, slots=True)
class Reading:
    """A wrong reading, and the drafter's input under it."""

    says: str
    drafter_input: DrafterInput


def readings(scene: PrefillScene, phase: str, suspects: Sequence[str]) -> Iterator[Reading]:
    """List the readings that may explain a difference.

    phase: of the first tensor that differs. suspects: weights that make it from the last tensor that is equal.
    """
    run = scene.drafter_input
    if not phase.startswith("draft"):
        yield from _of_features(scene, run)
        yield from _of_ids(run)
    if phase == "target":
        return
    for says, change in _of_rows(scene, suspects):
        rows = change(run.context)
        if rows is None:
            continue
        if phase.startswith("draft"):
            yield Reading(f"{says} (rows that draft)", replace(run, drafting=rows))
        else:
            yield Reading(says, replace(run, context=rows, drafting=rows))
            yield Reading(f"{says} (rows of the prompt only)", replace(run, context=rows))


def _of_features(scene: PrefillScene, run: DrafterInput) -> Iterator[Reading]:
    """Read other hidden states of the target, or in another order, or of other positions."""
    hidden = [*scene.entering, *([] if scene.last_output is None else [scene.last_output])]
    layers = scene.drafter.config.feature_layers

    def joined(says: str, states: Sequence[torch.Tensor]) -> Reading:
        return Reading(says, replace(run, features_RF=torch.cat(list(states), dim=-1)))

    for shift, where in ((1, "leaving the layers that it should enter: ids one too high"), (-1, "one layer too early")):
        shifted = [layer + shift for layer in layers]
        if shifted and shifted[0] >= 0 and shifted[-1] < len(hidden):
            yield joined(f"hidden states {where} (inputs of layers {_listed(shifted)})", [hidden[i] for i in shifted])
    if 1 < len(layers) <= _MOST_ORDERED:
        for order in list(permutations(layers))[1:]:
            yield joined(f"features in another order: layers {_listed(order)}", [hidden[layer] for layer in order])
    norm = scene.final_norm
    if layers:
        yield joined("every feature after the target's final norm", [norm(hidden[layer]) for layer in layers])
    else:
        yield joined("hidden states after the target's final norm was applied twice", [norm(scene.head_input)])
    if not layers and scene.last_output is not None:
        yield joined("hidden states before the target's final norm", [scene.last_output])
    for shift, where in ((1, "before"), (-1, "after")):
        yield joined(f"features of the position {where} each row's", [run.features_RF.roll(shift, 0)])


def _of_ids(run: DrafterInput) -> Iterator[Reading]:
    """Read the token of each row from another place."""
    ids = run.input_ids_R
    earlier = replace(run, input_ids_R=torch.cat([ids[:1], ids[:-1]]), next_token=int(ids[-1]))
    yield Reading("each row has its own token, not the next one: ids are not shifted", earlier)
    later = replace(run, input_ids_R=torch.cat([ids[1:], torch.tensor([run.next_token])]))
    yield Reading("each row has the token after the next: ids are shifted twice", later)


Change = Callable[[Rows], Rows | None]


def _of_rows(scene: PrefillScene, suspects: Sequence[str]) -> Iterator[tuple[str, Change]]:
    """Read config or weights of the drafter in another way."""
    for shift in (1, -1, 2, -2):
        yield f"positions off by {shift:+d}", lambda rows, shift=shift: replace(rows, position_shift=shift)
    yield from _of_rope(scene.drafter.config.model, scene.target_checkpoint.config)
    yield from _of_config(scene.drafter)
    yield from _of_embedding(scene)
    yield from _of_head(scene)
    yield from _of_norms(scene.drafter, suspects)
    yield from _of_products(scene.drafter, suspects)


def _with_model(**changes: Any) -> Change:
    def change(rows: Rows) -> Rows:
        config = rows.drafter.config
        model = config.model.with_heads(**changes) if "rope" in changes else replace(config.model, **changes)
        return replace(rows, drafter=replace(rows.drafter, config=replace(config, model=model)))

    return change


def _of_rope(model: ModelConfig, target: ModelConfig) -> Iterator[tuple[str, Change]]:
    if not all(isinstance(layer.attention, HeadAttention) for layer in model.layers):
        return
    rope = model.rope
    for theta in sorted({*_THETAS, target.rope.theta} - {rope.theta}):
        yield f"rope theta {theta:g}, not {rope.theta:g}", _with_model(rope=replace(rope, theta=theta))
    others: list[tuple[str, Rope]] = [("rotary pairs (2i, 2i+1)", replace(rope, interleaved=not rope.interleaved))]
    if rope.scaling:
        others.append(("no rotary scaling", replace(rope, scaling={})))
    if target.rope.scaling != rope.scaling:
        others.append(("the target's rotary scaling", replace(rope, scaling=target.rope.scaling)))
    for says, other in others:
        yield says, _with_model(rope=other)


def _of_config(drafter: DrafterCheckpoint) -> Iterator[tuple[str, Change]]:
    """Turn each flag of the config, and take another epsilon."""
    for field in fields(drafter.config):
        value = getattr(drafter.config, field.name)
        if isinstance(value, bool):
            yield f"{field.name} is {not value}, not {value}", _with_config(**{field.name: not value})
    for eps in {1e-5, 1e-6} - {drafter.config.model.rms_norm_eps}:
        yield f"rms_norm_eps {eps:g}", _with_model(rms_norm_eps=eps)


def _with_config(**changes: Any) -> Change:
    return lambda rows: replace(rows, drafter=replace(rows.drafter, config=replace(rows.drafter.config, **changes)))


def _with_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    """Replace tensors of the drafter."""

    def changed(rows: Rows) -> Rows:
        tensors = dict(rows.drafter.tensors)
        new = {name: tensor.clone() for name, tensor in change(tensors).items()}  # a recorder knows weights by address
        return replace(rows, drafter=replace(rows.drafter, tensors=tensors | new))

    return changed


def _of_embedding(scene: PrefillScene) -> Iterator[tuple[str, Change]]:
    target_table = scene.target_checkpoint.tensors["model.embed_tokens.weight"]
    table = scene.drafter.tensors.get("embed_tokens.weight", target_table)
    root = math.sqrt(table.shape[1])
    for says, other in (("times √H", table * root), ("divided by √H", table / root), ("of the target", target_table)):
        if not torch.equal(other, table):
            yield f"the embedding {says}", _with_tensors(lambda _, other=other: {"embed_tokens.weight": other})


def _of_head(scene: PrefillScene) -> Iterator[tuple[str, Change]]:
    """Take the target's head or embedding in place of the draft head, and read d2t in other ways."""
    tensors = scene.drafter.tensors
    d2t = tensors.get("d2t")
    ids = torch.arange(scene.drafter.config.draft_vocab_size)
    target_ids = ids if d2t is None else ids + d2t
    for says, name in (("head", "lm_head.weight"), ("embedding", "model.embed_tokens.weight")):
        head = scene.target_checkpoint.tensors[name]
        for rows, which in ((target_ids, "of the draft vocabulary"), (ids, "from 0 on")):
            value = {"lm_head.weight": head[rows]}
            yield f"the target's {says} as the draft head, rows {which}", _with_tensors(lambda _, value=value: value)
    if d2t is not None:
        yield "d2t read as target ids, not as offsets", _with_tensors(lambda _: {"d2t": d2t - ids})
        yield "d2t left out", _with_tensors(lambda _: {"d2t": torch.zeros_like(d2t)})


def _of_norms(drafter: DrafterCheckpoint, suspects: Sequence[str]) -> Iterator[tuple[str, Change]]:
    norms = [name.removesuffix(".weight") for name in drafter.tensors if name.endswith("norm.weight")]
    for kind in sorted({re.sub(r"layers\.\d+\.", "layers.*.", name) for name in norms if "layers." in name}):
        first = drafter.tensors.get(f"{kind.replace('*', '0')}.weight")
        alike = [f"{name}.weight" for name in norms if re.sub(r"layers\.\d+\.", "layers.*.", name) == kind]
        if first is not None and len(alike) > 1:
            says = f"the weight of layer 0's {kind.rpartition('.')[2]} used for all layers"
            yield says, _with_tensors(lambda _, alike=alike, first=first: dict.fromkeys(alike, first))
    for name in (name for name in norms if name in suspects):
        weight = drafter.tensors[f"{name}.weight"]
        yield f"{name} left out", lambda rows, name=name: replace(rows, without=frozenset([name]))
        others = {"1 + its weight": weight + 1, "its weight left at 1": torch.ones_like(weight)}
        same = (other for other in norms if other != name and drafter.tensors[f"{other}.weight"].shape == weight.shape)
        others |= {f"the weight of {other}": drafter.tensors[f"{other}.weight"] for other in same}
        for says, value in others.items():
            yield f"{name} with {says}", _with_tensors(lambda _, n=name, value=value: {f"{n}.weight": value})
    heads = frozenset(name for name in norms if name.endswith(("q_norm", "k_norm")))
    if heads:
        yield "norms of queries and keys left out", lambda rows: replace(rows, without=heads)


def _of_products(drafter: DrafterCheckpoint, suspects: Sequence[str]) -> Iterator[tuple[str, Change]]:
    tensors = drafter.tensors
    biases = [name for name in tensors if name.endswith(".bias")]
    if biases:
        zeros = {name: torch.zeros_like(tensors[name]) for name in biases}
        yield "biases left out", _with_tensors(lambda _: zeros)
    for name in suspects:
        weight = tensors.get(f"{name}.weight")
        if weight is None or weight.ndim != 2:
            continue
        others = {"left at 0": torch.zeros_like(weight)}
        if weight.shape[0] == weight.shape[1]:
            others["transposed"] = weight.T.contiguous()
        others |= {
            f"replaced by {other}": tensors[f"{other}.weight"]
            for other in _in_other_layers(name, drafter)
            if tensors[f"{other}.weight"].shape == weight.shape
        }
        for says, value in others.items():
            yield f"{name}.weight {says}", _with_tensors(lambda _, n=name, value=value: {f"{n}.weight": value})
    yield from _of_exchanges(drafter)


def _in_other_layers(name: str, drafter: DrafterCheckpoint) -> list[str]:
    form = re.sub(r"(?<=layers\\\.)\d+", r"\\d+", re.escape(name))
    names = (other.removesuffix(".weight") for other in drafter.tensors)
    return [other for other in names if other != name and re.fullmatch(form, other)]


def _of_exchanges(drafter: DrafterCheckpoint) -> Iterator[tuple[str, Change]]:
    """Exchange weights of one shape, and the halves of inputs that are two vectors."""
    tensors = drafter.tensors
    for one, other in _EXCHANGED:
        names = [name for name in tensors if name.endswith(f"{one}.weight")]
        pairs = {name: name.replace(one, other) for name in names}
        if pairs and all(tensors[a].shape == tensors[b].shape for a, b in pairs.items()):
            value = {a: tensors[b] for a, b in pairs.items()} | {b: tensors[a] for a, b in pairs.items()}
            yield f"{one} and {other} exchanged", _with_tensors(lambda _, value=value: value)
    width = 2 * drafter.config.model.hidden_size
    wide = {name: x for name, x in tensors.items() if x.ndim == 2 and x.shape[1] == width and "mlp" not in name}
    if wide:
        halves = {name: x.roll(width // 2, 1) for name, x in wide.items()}
        yield "embedding and hidden state exchanged in the concatenated input", _with_tensors(lambda _: halves)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
