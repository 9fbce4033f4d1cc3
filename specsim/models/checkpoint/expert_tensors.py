"""Experts' tensors in the layout of our engines, from the layouts of published checkpoints.

Ours: mlp.router.{weight, bias, correction_bias}, mlp.experts.gate_up_proj.weight [experts, 2 · size, hidden] with the
gate's rows first, and mlp.experts.down_proj.weight [experts, hidden, size]; biases likewise. Published: one file entry
for each expert and projection (Qwen3-MoE, DeepSeek-V3), or stacked ones without `.weight` as transformers 5 writes
them, which GPT-OSS has transposed, with gate and up in alternate columns.
"""

import re
from collections.abc import Iterator, Mapping

import torch

from specsim.core.errors import InputError, require
from specsim.core.layer_config import Experts
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.weights import Stored

_ROUTER = {"gate.weight": "router.weight", "gate.e_score_correction_bias": "router.correction_bias"}
_STACKED = r"experts\.(gate_up_proj|down_proj)(_bias)?"
_SINGLE = r"experts\.(\d+)\.(gate|up|down)_proj\.weight"


def gather_experts(named: Mapping[str, Stored], config: ModelConfig, prefix: str) -> dict[str, Stored]:
    """Convert the experts of every layer that has some; prefix: of layers' names, without their number."""
    gathered = dict(named)
    for index in config.expert_layers:
        experts = config.layers[index].mlp
        assert isinstance(experts, Experts)
        module = f"{prefix}.{index}.mlp."
        own = {name.removeprefix(module): gathered.pop(name) for name in list(gathered) if name.startswith(module)}
        converted = _of_layer(own, experts, config)
        gathered |= {f"{module}{name}": entry for name, entry in converted}
    return gathered


def _of_layer(own: dict[str, Stored], experts: Experts, config: ModelConfig) -> Iterator[tuple[str, Stored]]:
    singles: dict[tuple[int, str], Stored] = {}
    for name, entry in own.items():
        if name.endswith(("_blocks", "_scales")):
            allowed = "experts of floating point, gate_up_proj and down_proj, as transformers saves them dequantised"
            raise InputError(f"{entry.key} in {entry.file}", "MXFP4", allowed)
        if found := re.fullmatch(_SINGLE, name):
            singles[int(found[1]), found[2]] = entry
        elif found := re.fullmatch(_STACKED, name):
            kind = "bias" if found[2] else "weight"
            yield f"experts.{found[1]}.{kind}", _oriented(entry, found[1], config.family == "gpt_oss")
        else:
            yield _ROUTER.get(name, name), entry
    if singles:
        yield from _stack(singles, experts, config.hidden_size)


def _oriented(entry: Stored, projection: str, is_transposed: bool) -> Stored:
    """Turn GPT-OSS's stacked experts, and put the gate's rows before those of up."""
    tensor = entry.tensor
    if not is_transposed:
        return entry
    if tensor.dim() == 3:
        tensor = tensor.mT
    if projection == "gate_up_proj" and tensor.dim() >= 2:
        tensor = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1)
    return entry._replace(tensor=tensor.contiguous())


def _stack(
    singles: Mapping[tuple[int, str], Stored], experts: Experts, hidden_size: int
) -> Iterator[tuple[str, Stored]]:
    """Stack the projections of single experts."""
    first = next(iter(singles.values()))
    shapes = dict.fromkeys(("gate", "up"), (experts.size, hidden_size)) | {"down": (hidden_size, experts.size)}
    for (expert, part), entry in singles.items():
        where = f"{entry.key} in {entry.file}"
        require(expert < experts.num_experts, where, "unexpected", f"experts 0 to {experts.num_experts - 1}")
        require(
            entry.tensor.shape == shapes[part], f"the shape of {where}", list(entry.tensor.shape), f"{shapes[part]}"
        )
    for expert in range(experts.num_experts):
        for part, shape in shapes.items():
            name = re.sub(r"\.\d+\.\w+_proj\.weight$", f".{expert}.{part}_proj.weight", first.key)
            allowed = f"a tensor of shape {list(shape)}"
            require((expert, part) in singles, f"{name} in {first.file.parent}", "missing", allowed)
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        each = [torch.cat([singles[index, part].tensor for part in parts]) for index in range(experts.num_experts)]
        yield f"experts.{name}.weight", first._replace(tensor=torch.stack(each))
