"""Launch of the persistent forward, with the target's weights stacked over layers, and the limits of its use."""

import importlib.metadata
from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.pool import KVBuffer
from specsim.core.target import DenseMLP, HeadAttention, ModelConfig
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.persistent.schedule import HEAD_DIM, MOST_ROWS, STRIDE, ForwardSchedule
from specsim.fast.runtime.launch import GLUON_TRITON, capability

PROGRAMS = 128  # all of which are resident, one on a multiprocessor
_MOST_PAIRS = 64
# Timed and faster, on this GPU and for the shapes of Llama-3-8B and Qwen3-8B.
_TIMED_GPU = "NVIDIA H200"
_TIMED_KV_HEADS = 8
_TIMED_WEIGHTS = (192_000_000, 219_000_000)  # of a layer
_MOST_COPIED = 1 / 8  # of the GPU's memory: layers' weights are copied where a pair keeps its own on the GPU
_PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
_ALL = 2**30  # columns of a window that is none
_REGISTERS = 168  # of a thread; the roles of one warp release some
_SMALL_ROLE = {8: 80, 16: 88}  # registers of a thread of these, by the width of the rows


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
        if isinstance(attention, HeadAttention) and (limit := _attention_limit(attention)):
            return limit
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
    if attention.first_columns:
        return "a model whose windows have no first columns"
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
    compute = capability()
    if compute is None or compute[0] != 9:
        machine = "this machine has none" if compute is None else f"this one has {compute[0]}.{compute[1]}"
        return f"a GPU of compute capability 9.0; {machine}"
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


def _stack(tensors: dict[str, torch.Tensor], layers: int, name: str) -> torch.Tensor:
    """Stack a weight over layers, and replace each layer's by a view, so that it is stored once."""
    names = [f"model.layers.{layer}.{name}.weight" for layer in range(layers)]
    stack = torch.empty(
        layers, *tensors[names[0]].shape, dtype=tensors[names[0]].dtype, device=tensors[names[0]].device
    )
    for layer, tensor_name in enumerate(names):
        stack[layer] = tensors.pop(tensor_name)
        tensors[tensor_name] = stack[layer]
    return stack


def schedule_of(
    model: ModelConfig, requests: int, nodes: int, features: tuple[int, ...] = (), batch_invariant: bool = False
) -> ForwardSchedule:
    """Make the schedule of a forward of a model that fits, or raise InputError."""
    limit = model_limit(model) or batch_limit(model, requests, nodes)
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    if limit or not isinstance(attention, HeadAttention) or not isinstance(mlp, DenseMLP):
        raise InputError("forward", "persistent", f"kernels or auto here; persistent needs {limit}")
    return ForwardSchedule(
        hidden=model.hidden_size,
        inner=mlp.size,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        layers=model.num_layers,
        requests=requests,
        nodes=nodes,
        programs=PROGRAMS,
        has_head_norms=attention.has_head_norms,
        has_windows=any(model.sliding_windows),
        features=features,
        batch_invariant=batch_invariant,
        eps=model.rms_norm_eps,
    )


def _fits(kv: KVBuffer) -> bool:
    """Check whether 32 bits address a layer's keys."""
    return kv.keys[0].numel() < 2**31


def new_counters(schedule: ForwardSchedule, device: torch.device) -> torch.Tensor:
    """Make the counters of one forward, all of them 0."""
    return torch.zeros(schedule.num_counters * STRIDE, dtype=torch.int32, device=device)


class PersistentForward:
    """The layers of a decoder as one kernel.

    tensors: the target's, by the names of specsim.fast.layers; layers' weights become views of their stacks.
    where_it_fits: leave batches that do not fit to the kernels. batch_invariant: compute a
    request's rows bit for bit as alone, whatever the number of requests.
    """

    def __init__(
        self,
        model: ModelConfig,
        tensors: dict[str, torch.Tensor],
        where_it_fits: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self._model = model
        self._where_it_fits = where_it_fits
        self._batch_invariant = batch_invariant
        layers = model.num_layers
        products = [_stack(tensors, layers, name) for name in _PRODUCTS]
        norms = [
            _stack(tensors, layers, name) if f"model.layers.0.{name}.weight" in tensors else None for name in _NORMS
        ]
        self._embedding = tensors["model.embed_tokens.weight"]
        self._norms = [products[0] if norm is None else norm for norm in norms]
        self._norms[0] = torch.cat([self._norms[0], tensors["model.norm.weight"][None]])
        windows = [_ALL if window is None else window for window in model.sliding_windows]
        self._windows = torch.tensor(windows, dtype=torch.int32, device=self._embedding.device)
        self._error = torch.zeros(1, dtype=torch.int32, pin_memory=self._embedding.is_cuda)
        self._weights = self._descriptors(products)

    def _descriptors(self, products: list[torch.Tensor]) -> dict[str, Any]:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from specsim.fast.persistent.memory import HALVES, WEIGHTS

        def rows_of(weight: torch.Tensor) -> Any:
            layers, outputs, inputs = weight.shape
            shape = [inputs // 64, layers * outputs, 64]
            return TensorDescriptor(weight, shape, [64, inputs, 1], [16, 16, 64], WEIGHTS.value)

        def halves_of(weight: torch.Tensor, half: int) -> Any:
            layers, outputs, inputs = weight.shape
            shape = [inputs // 64, layers * outputs // half, half, 64]
            return TensorDescriptor(weight, shape, [64, half * inputs, inputs, 1], [16, 2, 8, 64], HALVES.value)

        qkv, o, gate_up, down = products
        return {
            "qkv": halves_of(qkv, 64),
            "o": rows_of(o),
            "gate_up": halves_of(gate_up, gate_up.shape[1] // 2),
            "down": rows_of(down),
        }

    def check(self) -> None:
        """Raise RuntimeError where a program has awaited another in vain, without waiting for the device."""
        if self._error[0]:
            raise RuntimeError(
                "a program of the persistent forward awaited another in vain, so that results since then are wrong; "
                "use forward='kernels', and report the model, the batch and the GPU"
            )

    def takes(self, metadata: AttentionMetadata, kv: KVBuffer) -> bool:
        """Check whether rows are those of a tree, whose forward must then fit, or is taken where it does."""
        is_tree = not metadata.is_causal and metadata.has_equal_rows
        if not self._where_it_fits or not is_tree:
            return is_tree
        return batch_limit(self._model, len(metadata.num_extras), metadata.max_rows) is None and _fits(kv)

    def __call__(
        self,
        ids_R: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv: KVBuffer,
        features: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers and write their KV: (rows before the final norm [R, H], features [R, F])."""
        from specsim.fast.persistent import memory
        from specsim.fast.persistent.kernel import forward
        from specsim.fast.runtime.gluon import Constants

        requests, nodes = len(metadata.num_extras), metadata.max_rows
        schedule = schedule_of(self._model, requests, nodes, features, self._batch_invariant)
        if not _fits(kv):
            allowed = "kernels or auto with KV of 2³¹ numbers or more in a layer; persistent addresses fewer"
            raise InputError("forward", "persistent", allowed)
        rows, hidden, dtype = schedule.rows, schedule.hidden, self._embedding.dtype

        def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=ids_R.device)

        parts = schedule.units * schedule.splits * schedule.pairs
        work = memory.ForwardMemory(
            residual=new(rows, hidden),
            weighted=new(rows, hidden),
            squares=new(rows, schedule.residual_tiles, dtype=torch.float32),
            query=new(rows, schedule.heads * 128),
            key=new(rows, schedule.kv_heads * 128),
            head_squares=new(rows, schedule.heads + schedule.kv_heads, 8, dtype=torch.float32),
            attended=new(rows, schedule.heads * 128),
            inner=new(rows, schedule.inner),
            parts=new(parts, 128, dtype=torch.float32),
            stats=new(parts, 2, dtype=torch.float32),
            features=new(rows, max(1, len(features)) * hidden),
            counters=new_counters(schedule, ids_R.device),
            error=self._error,
        )
        meta = memory.Meta(
            ids=ids_R,
            positions=metadata.positions,
            slots=metadata.slots,
            prefix_lens=metadata.prefix_lens,
            visible=metadata.visible,
            key_lens=metadata.key_lens,
            table=metadata.table,
            table_rows=metadata.table_rows,
            cos_sin=cos_sin,
            windows=self._windows,
        )
        forward[(schedule.programs,)](
            **self._weights,
            cache=(kv.keys, kv.values),
            tables=memory.Tables(self._embedding, *self._norms),
            meta=meta,
            work=work,
            num_slots=kv.keys.shape[1],
            columns=metadata.table.shape[1],
            S=Constants(schedule),
            REGS=_SMALL_ROLE[schedule.width],
            num_warps=8,
            maxnreg=_REGISTERS,
        )
        return work.residual, work.features
