"""The pairs of the differential, by name: small random ones, and the shipped one."""

from dataclasses import replace

import torch

from specsim.core.errors import InputError
from specsim.core.pair import Pair
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
        model, noise = "llama" if family in ("noisy", "twins") else family, 0.15 if family == "noisy" else 0.02
        pair = synthetic_pair(kind, model, noise=noise, window=_WINDOW.get(family))
    return rounded(_with_twins(pair) if family == "twins" else pair, dtype)


def rounded(pair: Pair, dtype: torch.dtype) -> Pair:
    """The pair with its weights as dtype holds them."""
    return replace(pair, target=_rounded(pair.target, dtype), drafter=_rounded(pair.drafter, dtype))


def moved(pair: Pair, seed: int) -> Pair:
    """The pair with every weight one unit in the last place up or down, or where it is, at random."""
    generator = torch.Generator().manual_seed(seed)

    def beside(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        towards = torch.tensor([-torch.inf, torch.nan, torch.inf], dtype=tensor.dtype)
        towards = towards[torch.randint(3, tensor.shape, generator=generator)]
        return torch.where(towards.isnan(), tensor, torch.nextafter(tensor, towards))

    def checkpoint(each):
        return replace(each, tensors={name: beside(tensor) for name, tensor in each.tensors.items()})

    return replace(pair, target=checkpoint(pair.target), drafter=checkpoint(pair.drafter))


def _with_twins(pair: Pair) -> Pair:
    def doubled(checkpoint):
        head = checkpoint.tensors.get("lm_head.weight")
        if head is None:
            return checkpoint
        twins = head[torch.arange(len(head)) // 2 * 2]
        return replace(checkpoint, tensors={**checkpoint.tensors, "lm_head.weight": twins})

    return replace(pair, target=doubled(pair.target), drafter=doubled(pair.drafter))


def _rounded(checkpoint, dtype: torch.dtype):
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)
