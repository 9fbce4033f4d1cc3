"""The pairs of the differential, by name: small random ones, and the shipped one."""

from collections.abc import Callable
from dataclasses import replace

import torch

from specsim.core.errors import InputError
from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.models.load import load
from specsim.models.synthetic_pair import synthetic_pair

KINDS = ("eagle", "eagle3")
FAMILIES = ("llama", "qwen3", "mistral", "noisy", "twins", "shipped")
_WINDOW = {"mistral": 7}


def make_pair(name: str, dtype: torch.dtype = torch.float64) -> Pair:
    """`kind-family`, such as `eagle3-qwen3`; with weights rounded to dtype, so that float64 runs have the same.

    `noisy`: a drafter most of whose hidden state comes from its layers, so that nothing in them is too small to show.
    `twins`: a target in which every odd token has the row of the even one before it in the head, so that logits tie.
    `shipped`: the pair that comes with the package.
    """
    kind, _, family = name.partition("-")
    if kind not in KINDS or family not in FAMILIES:
        raise InputError("pair", name, f"{' or '.join(KINDS)}, a hyphen, {' or '.join(FAMILIES)}")
    if family == "shipped":
        pair = load(drafter=kind)
    else:
        model = "llama" if family in ("noisy", "twins") else family
        noise = 0.15 if family == "noisy" else 0.02
        pair = synthetic_pair(kind, model, noise=noise, window=_WINDOW.get(family))
    return rounded(_with_twins(pair) if family == "twins" else pair, dtype)


def rounded(pair: Pair, dtype: torch.dtype) -> Pair:
    """The pair with its weights as dtype holds them."""
    return _changed(pair, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def moved(pair: Pair, seed: int) -> Pair:
    """The pair with every weight one unit in the last place up or down, or where it is, at random."""
    generator = torch.Generator().manual_seed(seed)

    def beside(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        towards = torch.tensor([-torch.inf, torch.nan, torch.inf], dtype=tensor.dtype)
        towards = towards[torch.randint(3, tensor.shape, generator=generator)]
        return torch.where(towards.isnan(), tensor, torch.nextafter(tensor, towards))

    return _changed(pair, beside)


def _with_twins(pair: Pair) -> Pair:
    head = pair.target.tensors["lm_head.weight"]
    target = replace(pair.target, tensors={**pair.target.tensors, "lm_head.weight": _twins(head)})
    drafter = pair.drafter
    if drafter is not None and "lm_head.weight" in drafter.tensors:
        tensors = {**drafter.tensors, "lm_head.weight": _twins(drafter.tensors["lm_head.weight"])}
        drafter = replace(drafter, tensors=tensors)
    return replace(pair, target=target, drafter=drafter)


def _twins(head: torch.Tensor) -> torch.Tensor:
    return head[torch.arange(len(head)) // 2 * 2]


def _changed(pair: Pair, change: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
    """The pair with every tensor changed."""

    def tensors(each: TargetCheckpoint | DrafterCheckpoint) -> dict[str, torch.Tensor]:
        return {name: change(tensor) for name, tensor in each.tensors.items()}

    target = replace(pair.target, tensors=tensors(pair.target))
    return replace(pair, target=target, drafter=pair.drafter and replace(pair.drafter, tensors=tensors(pair.drafter)))
