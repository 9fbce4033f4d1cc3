"""Limits of the persistent forward: one sentence for a model, an engine or a forward that it does not take."""

import importlib.metadata

import torch

from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.target import DenseMLP, HeadAttention, ModelConfig
from specsim.fast.persistent.schedule import HEAD_DIM, MOST_ROWS
from specsim.fast.runtime.launch import GLUON_TRITON, capability

PROGRAMS = 128  # all of which are resident, one on a multiprocessor
_MOST_PAIRS = 64
# Timed and faster, on this GPU and for the shapes of Llama-3-8B and Qwen3-8B.
_TIMED_GPU = "NVIDIA H200"
_TIMED_KV_HEADS = 8
_TIMED_WEIGHTS = (192_000_000, 219_000_000)  # of a layer
_MOST_COPIED = 1 / 8  # of the GPU's memory: layers' weights are copied where a pair keeps its own on the GPU


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
    if ".".join(version.split(".")[:2]) not in GLUON_TRITON:
        return f"Triton {' or '.join(GLUON_TRITON)}, not {version}"
    return None


def uses_persistent(model: ModelConfig, options: EngineOptions, config: SpecConfig) -> bool:
    """Check whether an engine's target runs persistent forwards; raise InputError where it should and cannot.

    With forward `auto` it does where they are faster: on this GPU with this model, and then for batches that fit. With
    batch_invariant it never does, as the other batches' bits are those of the kernels.
    """
    if options.forward == "kernels":
        return False
    limit = engine_limit(options) or model_limit(model)
    if options.forward == "auto":
        return not limit and not options.batch_invariant and not machine_limit() and _is_timed(model)
    if limit := limit or batch_limit(model, 1, config.num_draft_tokens) or machine_limit():
        raise InputError("forward", options.forward, f"kernels or auto here; persistent needs {limit}")
    return True


def _is_timed(model: ModelConfig) -> bool:
    """Check whether a model that fits is like those that were timed, on the GPU where they were."""
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    if not isinstance(attention, HeadAttention) or not isinstance(mlp, DenseMLP):
        return False
    channels = 2 * (attention.num_heads + attention.num_kv_heads) * HEAD_DIM  # of queries, keys, values and output
    weights = model.hidden_size * (channels + 3 * mlp.size)
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (
        gpu.name == _TIMED_GPU
        and attention.num_kv_heads == _TIMED_KV_HEADS
        and _TIMED_WEIGHTS[0] <= weights <= _TIMED_WEIGHTS[1]
        and 2 * model.num_layers * weights <= _MOST_COPIED * gpu.total_memory
    )


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
