"""Limits of the persistent forward: one sentence for a model, an engine or a forward that it does not take."""

import importlib.metadata

import torch

from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.layer_config import DenseMLP, HeadAttention
from specsim.core.target import ModelConfig
from specsim.fast.persistent.schedule import HEAD_DIM, MOST_ROWS
from specsim.fast.runtime.launch import capability

PROGRAMS = 128  # all of which are resident, one on a multiprocessor
TRITON = ("3.6", "3.7")  # whose names kernel.py knows
_MOST_PAIRS = 64


def model_limit(model: ModelConfig) -> str | None:
    """Say why a model does not fit, None if it does."""
    kinds = {(type(layer.attention), type(layer.mlp)) for layer in model.layers}
    if kinds != {(HeadAttention, DenseMLP)}:
        return "a model whose layers all have attention heads and one MLP; experts and latent attention are others"
    shapes = {(layer.attention.num_heads, layer.attention.num_kv_heads, layer.mlp.size) for layer in model.layers}  # pyright: ignore[reportAttributeAccessIssue] - of the kinds above
    if len(shapes) > 1:
        return f"a model whose layers have one shape, not {len(shapes)}"
    for layer in model.layers:
        attention = layer.attention
        if isinstance(attention, HeadAttention) and (found := _attention_limit(attention)):
            return found
        if isinstance(layer.mlp, DenseMLP) and layer.mlp.bias:
            return "a model without biases; its MLP has them"
    _, _, inner = shapes.pop()
    for name, size in (("hidden_size", model.hidden_size), ("intermediate_size", inner)):
        if size % 64:
            return f"a model whose {name} is a multiple of 64, not {size}"
    return None


def _attention_limit(attention: HeadAttention) -> str | None:
    if attention.head_dim != HEAD_DIM:
        return f"a model with heads of {HEAD_DIM} channels, not {attention.head_dim}"
    if attention.rope.size != HEAD_DIM or attention.rope.interleaved:
        return "a model that rotates all channels of a head in pairs (i, i + D/2)"
    if attention.bias or attention.output_bias or attention.has_sinks:
        return "a model whose attention has neither biases nor sinks"
    if attention.window is not None and attention.window < MOST_ROWS:
        return f"a model whose windows are at least {MOST_ROWS}, not {attention.window}"
    return None


def engine_limit(options: EngineOptions) -> str | None:
    """Say why an engine's options do not fit, None if they do."""
    if options.dtype != torch.bfloat16:
        return f"dtype bfloat16, not {str(options.dtype).removeprefix('torch.')}"
    if options.kv_dtype != "model":
        return f"kv_dtype model, not {options.kv_dtype}"
    if options.tensor_parallel > 1:
        return "one GPU, as ranks would have to exchange sums inside the kernel"
    if options.batch_invariant:
        return "batch_invariant False, as a request's keys are cut into parts by the number of requests"
    return None


def machine_limit() -> str | None:
    """Say why this machine's GPU or Triton does not fit, None if they do."""
    own = capability()
    if own is None or own[0] != 9:
        found = "this machine has none" if own is None else f"this one has {own[0]}.{own[1]}"
        return f"a GPU of compute capability 9.0; {found}"
    count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    if count < PROGRAMS:
        return f"a GPU with {PROGRAMS} multiprocessors, one for each program; this one has {count}"
    version = importlib.metadata.version("triton")
    if ".".join(version.split(".")[:2]) not in TRITON:
        return f"Triton {' or '.join(TRITON)}, not {version}"
    return None


def uses_persistent(model: ModelConfig, options: EngineOptions, config: SpecConfig) -> bool:
    """Check whether an engine's target runs persistent forwards; raise InputError where it should and cannot.

    With forward `auto` it does not: no measurement of this package shows yet where it is never slower.
    """
    if options.forward != "persistent":
        return False
    limit = engine_limit(options) or model_limit(model) or batch_limit(model, 1, config.num_draft_tokens)
    if limit := limit or machine_limit():
        raise InputError("forward", options.forward, f"kernels or auto here; persistent needs {limit}")
    return True


def batch_limit(model: ModelConfig, requests: int, nodes: int) -> str | None:
    """Say why the forward of a round does not fit, None if it does."""
    attention = model.layers[0].attention
    if requests * nodes > MOST_ROWS:
        return f"at most {MOST_ROWS} rows, not {requests} requests of {nodes}"
    if isinstance(attention, HeadAttention):
        pairs = nodes * attention.num_heads // attention.num_kv_heads
        if pairs > _MOST_PAIRS:
            return f"at most {_MOST_PAIRS} pairs of a row and a query head of a KV head, not {pairs}"
        if requests * attention.num_kv_heads > PROGRAMS:
            return f"at most {PROGRAMS} pairs of a request and a KV head, not {requests * attention.num_kv_heads}"
    return None
