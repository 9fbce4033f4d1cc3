"""Launch of the persistent forward, with the target's weights stacked over layers."""

from typing import Any

import torch

from specsim.core.errors import InputError
from specsim.core.pool import KVBuffer
from specsim.core.target import DenseMLP, HeadAttention, ModelConfig
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.persistent.limits import PROGRAMS, batch_limit, model_limit
from specsim.fast.persistent.schedule import STRIDE, Schedule

_PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
_ALL = 2**30  # columns of a window that is none
_REGISTERS = 168  # of a thread; the roles of one warp release some
_SMALL_ROLE = {8: 80, 16: 88}  # registers of a thread of these, by the width of the rows


def _stack(tensors: dict[str, torch.Tensor], layers: int, name: str) -> torch.Tensor:
    """Stack a weight over layers, and replace each layer's by a view, so that it is stored once."""
    names = [f"model.layers.{layer}.{name}.weight" for layer in range(layers)]
    whole = torch.empty(
        layers, *tensors[names[0]].shape, dtype=tensors[names[0]].dtype, device=tensors[names[0]].device
    )
    for layer, each in enumerate(names):
        whole[layer] = tensors.pop(each)
        tensors[each] = whole[layer]
    return whole


def schedule_of(
    model: ModelConfig, requests: int, nodes: int, features: tuple[int, ...] = (), batch_invariant: bool = False
) -> Schedule:
    """Make the schedule of a forward of a model that fits, or raise InputError."""
    limit = model_limit(model) or batch_limit(model, requests, nodes)
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    if limit or not isinstance(attention, HeadAttention) or not isinstance(mlp, DenseMLP):
        raise InputError("forward", "persistent", f"kernels or auto here; persistent needs {limit}")
    return Schedule(
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


def new_counters(schedule: Schedule, device: torch.device) -> torch.Tensor:
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
        self._norms = [products[0] if each is None else each for each in norms]
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
        turns: torch.Tensor,
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
        work = memory.Work(
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
            turns=turns,
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
