"""Experts' tensors in the layout of our engines, from the layouts of published checkpoints.

Ours: mlp.router.{weight, bias, correction_bias}, mlp.experts.gate_up_proj.weight [experts, 2 · size, hidden] with the
gate's rows first, and mlp.experts.down_proj.weight [experts, hidden, size]; biases likewise. Published: one file entry
for each expert and projection (Qwen3-MoE, DeepSeek-V3), or stacked ones without `.weight` as transformers 5 writes
them, which GPT-OSS has transposed, with gate and up in alternate columns. The released GPT-OSS has them in MXFP4, not
transposed: blocks of 32 numbers in 4 bits with one power of two (OCP microscaling formats 1.0). They are converted to
bfloat16.
"""

import re
from collections.abc import Iterator, Mapping

import torch

from specsim.core.errors import InputError, require
from specsim.core.target import Experts, ModelConfig
from specsim.models.checkpoint.weights import Stored

_ROUTER = {"gate.weight": "router.weight", "gate.e_score_correction_bias": "router.correction_bias"}
_STACKED = r"experts\.(gate_up_proj|down_proj)(_bias)?"
_PACKED = r"experts\.(gate_up_proj|down_proj)_(blocks|scales)"  # in MXFP4
_SINGLE = r"experts\.(\d+)\.(gate|up|down)_proj\.weight"


def gather_experts(named: Mapping[str, Stored], config: ModelConfig, prefix: str) -> dict[str, Stored]:
    """Convert the experts of every layer that has some; prefix: of layers' names, without their number."""
    gathered = dict(named)
    for index in config.expert_layers:
        experts = config.layers[index].mlp
        assert isinstance(experts, Experts)
        module = f"{prefix}.{index}.mlp."
        layer_tensors = {
            name.removeprefix(module): gathered.pop(name) for name in list(gathered) if name.startswith(module)
        }
        converted = _of_layer(layer_tensors, experts, config)
        gathered |= {f"{module}{name}": entry for name, entry in converted}
    return gathered


def _of_layer(layer_tensors: dict[str, Stored], experts: Experts, config: ModelConfig) -> Iterator[tuple[str, Stored]]:
    singles: dict[tuple[int, str], Stored] = {}
    is_gpt_oss = config.family == "gpt_oss"
    for name, entry in layer_tensors.items():
        if is_gpt_oss and (match := re.fullmatch(_PACKED, name)):
            if match[2] == "blocks":
                floating = _floating(entry, layer_tensors.get(f"experts.{match[1]}_scales"))
                yield f"experts.{match[1]}.weight", _oriented(floating, match[1])
        elif match := re.fullmatch(_SINGLE, name):
            singles[int(match[1]), match[2]] = entry
        elif match := re.fullmatch(_STACKED, name):
            if is_gpt_oss:
                entry = _oriented(entry, match[1], is_transposed=entry.tensor.dim() == 3)
            yield f"experts.{match[1]}.{'bias' if match[2] else 'weight'}", entry
        else:
            yield _ROUTER.get(name, name), entry
    if singles:
        yield from _stack(singles, experts, config.hidden_size)


def _floating(entry: Stored, scales: Stored | None) -> Stored:
    """Convert experts in MXFP4 to bfloat16."""
    where = f"{entry.key} in {entry.file}"
    if scales is None:
        raise InputError(where, "without scales", f"{entry.key.removesuffix('blocks')}scales in the same folder")
    whole_shape = scales.whole_shape and (*scales.whole_shape[:-1], scales.whole_shape[-1] * BLOCK)
    return entry._replace(tensor=dequantised(entry.tensor, scales.tensor, where), whole_shape=whole_shape)


def _oriented(entry: Stored, projection: str, is_transposed: bool = False) -> Stored:
    """Turn GPT-OSS's stacked experts if they are transposed, and put the gate's rows before those of up."""
    tensor = entry.tensor.mT if is_transposed else entry.tensor
    whole_shape = (
        entry.whole_shape and (*entry.whole_shape[:1], *reversed(entry.whole_shape[1:]))
        if is_transposed
        else entry.whole_shape
    )
    if projection == "gate_up_proj" and tensor.dim() >= 2:
        tensor = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1)
    return entry._replace(tensor=tensor.contiguous(), whole_shape=whole_shape)


def _stack(
    singles: Mapping[tuple[int, str], Stored], experts: Experts, hidden_size: int
) -> Iterator[tuple[str, Stored]]:
    """Stack the projections of single experts."""
    first = next(iter(singles.values()))
    shapes = dict.fromkeys(("gate", "up"), (experts.size, hidden_size)) | {"down": (hidden_size, experts.size)}
    for (expert, part), entry in singles.items():
        where = f"{entry.key} in {entry.file}"
        require(expert < experts.num_experts, where, "unexpected", f"experts 0 to {experts.num_experts - 1}")
        require(entry.shape == shapes[part], f"the shape of {where}", list(entry.shape), f"{shapes[part]}")
    for expert in range(experts.num_experts):
        for part, shape in shapes.items():
            name = re.sub(r"\.\d+\.\w+_proj\.weight$", f".{expert}.{part}_proj.weight", first.key)
            allowed = f"a tensor of shape {list(shape)}"
            require((expert, part) in singles, f"{name} in {first.file.parent}", "missing", allowed)
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        expert_weights = [
            torch.cat([singles[index, part].tensor for part in parts]) for index in range(experts.num_experts)
        ]
        rows, columns = shapes[parts[0]]
        whole_shape = first.whole_shape and (experts.num_experts, len(parts) * rows, columns)
        yield f"experts.{name}.weight", first._replace(tensor=torch.stack(expert_weights), whole_shape=whole_shape)


BLOCK = 32
# By code: a sign bit, two bits of the exponent, one of the mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127  # of the scales' exponents


def dequantised(blocks: torch.Tensor, scales: torch.Tensor, where: str) -> torch.Tensor:
    """Compute the numbers of blocks, bf16 [..., 32 · blocks], which bfloat16 represents exactly.

    blocks: u8 [..., blocks, 16], each byte with an even number's code in its low half and the next one's in its high
    half. scales: u8 [..., blocks]. where: name and file, for the InputError of other shapes or types.
    """
    require(blocks.dtype == scales.dtype == torch.uint8, f"the type of {where}", blocks.dtype, "uint8, with its scales")
    shape = [*scales.shape, BLOCK // 2]
    require([*blocks.shape] == shape, f"the shape of {where}", [*blocks.shape], f"{shape}, as its scales have")
    values = torch.tensor(_VALUES, dtype=torch.bfloat16)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    numbers = torch.ldexp(values[codes.int()], scales.int()[..., None] - _BIAS)
    return numbers.flatten(-2)
