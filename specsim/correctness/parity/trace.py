"""Named tensors of a prefill and of the first drafts, as the reference computes them, in their order.

A name is a phase and the weight that makes the tensor: `extend/layers.0.self_attn.k_norm`. The reference runs
unchanged; a recorder sees the functions of torch that it calls. Dimensions: R rows · H hidden · F features.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.drafter import Placement
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError, require
from specsim.core.pair import DrafterCheckpoint, Pair
from specsim.core.phases import Batch, PrefillInput
from specsim.core.pool import KVPool

Tensors = Mapping[str, torch.Tensor]
NUM_STEPS = 3  # drafts of a trace, fewer where a block has fewer
PHASES = ("target", "extend", "draft")


@dataclass(frozen=True, slots=True)
class Rows:
    """A drafter as it reads some of its rows."""

    drafter: DrafterCheckpoint
    position_shift: int = 0  # added to the positions of rotary embeddings
    without: frozenset[str] = frozenset()  # norms that are left out


class Reached(Exception):
    """The end of a trace at the last tensor that is needed."""


class TensorRecorder(TorchFunctionMode):
    """Names for the results of torch's functions, by the weights that they read.

    last: tensor after which Reached is raised.
    """

    def __init__(self, weights: Tensors, phase: str, rows: Rows | None = None, last: str | None = None) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[Any, list[str]] = {}
        for name, weight in weights.items():
            self._names.setdefault(_key(weight), []).append(name.removesuffix(".weight"))
        self._phase = phase
        self._last = last
        self._forward = 1  # number of this forward in the phase
        self._shift = 0 if rows is None else rows.position_shift
        self._without = frozenset() if rows is None else rows.without
        self._block = ""  # part of the model that holds the last weight
        self._attended: torch.Tensor | None = None  # output of the last attention
        self._residual: torch.Tensor | None = None  # hidden states after it
        self._scale: torch.Tensor | None = None  # of the last norm
        self._before_norm: torch.Tensor | None = None  # its input

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and record its result."""
        if func is torch.Tensor.mul and self._shift and _is_angle(args):
            args = (args[0] + self._shift, args[1])
        output = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            self._record_product(args[1], output)
        elif func is torch.rsqrt:
            self._scale = output
        elif func is torch.Tensor.mul:
            output = self._product_of_norm(args[0], args[1], output)
        elif func is torch.Tensor.__getitem__:
            self._record_weight(args[0], output, is_table=True)
        elif func is torch.Tensor.add:
            self._record_sum(args, output)
        elif func is torch.einsum and args[0] == "qad,cad->aqc":
            self._record(f"{self._block}.q_rotated", args[1])
        elif func is torch.einsum and args[0] == "aqc,cad->qad":
            self._record(f"{self._block}.attn", output)
        elif func is torch.Tensor.__setitem__ and args[0].ndim == 4 and self._block.endswith("self_attn"):
            self._record_keys(args[2])
        return output

    def _record(self, name: str, tensor: torch.Tensor) -> None:
        name = name if self._phase == "target" else name.removeprefix("model.")
        if self._path(name) in self.tensors:
            self._forward += 1
        self.tensors[self._path(name)] = tensor.detach()
        if self._path(name) == self._last:
            raise Reached

    def _path(self, name: str) -> str:
        number = self._forward if self._phase == "draft" or self._forward > 1 else ""
        return f"{self._phase}{number}/{name}"

    def _record_weight(self, weight: torch.Tensor, output: torch.Tensor, is_table: bool = False) -> None:
        names = [name for name in self._names.get(_key(weight), ()) if ("embed_tokens" in name) == is_table]
        if names and output.ndim > 1:
            self._block = names[0].rpartition(".")[0]
            self._record(names[0], output)

    def _product_of_norm(self, one: Any, other: Any, output: torch.Tensor) -> torch.Tensor:
        """Record the last product of a norm; its result, or the norm's input where it is left out."""
        if other is self._scale and other is not None:
            self._before_norm = one
        elif isinstance(one, torch.Tensor):
            if self._before_norm is not None and self._without.intersection(self._names.get(_key(one), ())):
                output = self._before_norm.to(output.dtype)
            self._record_weight(one, output)
        return output

    def _record_product(self, weight: torch.Tensor, output: torch.Tensor) -> None:
        self._record_weight(weight, output)
        name = next(iter(self._names.get(_key(weight), ())), "")
        if name.endswith("self_attn.o_proj"):
            self._attended = output
        for last, parts in {"v_proj": "qkv", "up_proj": ("gate_", "up_")}.items():
            if name.endswith(last):
                self._record_joined(parts if isinstance(parts, tuple) else [f"{part}_" for part in parts])

    def _record_joined(self, parts: Any) -> None:
        """Record projections that engines make as one: qkv_proj and gate_up_proj."""
        block = self._block if self._phase == "target" else self._block.removeprefix("model.")
        projections = [self.tensors.get(self._path(f"{block}.{part}proj")) for part in parts]
        if all(tensor is not None for tensor in projections):
            joined = "qkv_proj" if len(parts) == 3 else "gate_up_proj"
            self._record(f"{self._block}.{joined}", torch.cat([x for x in projections if x is not None], dim=-1))

    def _record_sum(self, args: Any, output: torch.Tensor) -> None:
        if args[1] is self._attended and self._attended is not None:
            self._residual = output
            self._record(f"{self._block.removesuffix('.self_attn')}.after_attention", output)
        elif args[0] is self._residual and self._residual is not None and self._block.endswith(".mlp"):
            self._record(self._block.removesuffix(".mlp"), output)

    def _record_keys(self, rows: torch.Tensor) -> None:
        """Record what is written to a KV buffer: keys first, then values."""
        if self._path(f"{self._block}.k_rotated") not in self.tensors:
            self._record(f"{self._block}.k_rotated", rows)


def _key(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape


def _is_angle(factors: Any) -> bool:
    """Check for the product of positions [R, 1, 1] and frequencies [D/2] that rotary embeddings make."""
    one, other = factors
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and one.ndim == 3 and one.shape[1:] == (1, 1) and other.ndim == 1


class Tokens(NamedTuple):
    """Tokens of a request."""

    ids: tuple[int, ...]  # of the prompt
    next_id: int | None = None  # token after the prompt; None: the target's best


@dataclass(frozen=True, slots=True)
class DrafterInput:
    """Everything that the drafter computes from, which a reading changes."""

    context: Rows  # of the prompt
    drafting: Rows  # that draft
    features_RF: torch.Tensor  # hidden states of the target
    input_ids_R: torch.Tensor  # i64, the prompt
    next_token: int


class PrefillScene:
    """A target's prefill of one prompt in one dtype, after which its drafter may run in several ways."""

    def __init__(self, pair: Pair, tokens: Tokens, dtype: torch.dtype) -> None:
        if pair.checkpoint is None:
            raise InputError("draft", None, "a drafter with weights")
        from specsim.reference.attention import prefill_metadata
        from specsim.reference.engine import Engine

        length = len(tokens.ids)
        vocab_size = pair.target.config.vocab_size
        for token in tokens.ids:
            require(0 <= token < vocab_size, "token_ids", token, f"0 to {vocab_size - 1}, the target's tokens")
        self.target_checkpoint = in_dtype(pair.target, dtype)
        self.drafter = in_dtype(pair.checkpoint, dtype)
        self.dtype = dtype
        block = getattr(self.drafter.config, "block", None)
        num_steps = NUM_STEPS if block is None else min(NUM_STEPS, block.most_drafts)
        config = SpecConfig(1, num_steps, num_steps + 1, max_len=length + 2 * num_steps + 4)
        pair = replace(pair, target=self.target_checkpoint, drafter=self.drafter)
        self._engine = Engine(pair, config, EngineOptions(dtype=dtype))
        self._pools: KVPool = self._engine.make_pools(1, 2 * config.reserved_columns(length))
        self._row = self._pools.open()
        self._pools.reserve(self._row, config.reserved_columns(length))
        self._batch = Batch.of([0], [self._row], [length], [SamplingParams(temperature=0.0)], vocab_size)
        self._prefill = PrefillInput.of_prompts([tokens.ids])
        layers = tuple(range(pair.target.config.num_layers))
        metadata = prefill_metadata(self._batch, self._prefill, self._pools)
        with torch.no_grad(), TensorRecorder(pair.target.tensors, "target") as recorder:
            output = self._engine.target.forward(self._prefill.input_ids, metadata, self._pools.target, layers)
            logits_1V = self._engine.target.logits(output.hidden[-1:])
        self._target = recorder.tensors
        self.entering = output.features.split(pair.target.config.hidden_size, dim=-1)  # each layer
        self.head_input = output.hidden
        self.next_token = int(logits_1V.argmax()) if tokens.next_id is None else tokens.next_id

    @property
    def last_output(self) -> torch.Tensor | None:
        """Output of the last layer, before the final norm."""
        return self._target.get(f"target/model.layers.{len(self.entering) - 1}")

    def final_norm(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Apply the target's final norm."""
        from specsim.reference.layers import rms_norm

        model = self.target_checkpoint
        return rms_norm(hidden_RH, model.tensors["model.norm.weight"], model.config.rms_norm_eps)

    def features(self, layers: tuple[int, ...]) -> torch.Tensor:
        """Join the hidden states entering these layers, or take what the head reads if there are none."""
        states = [*self.entering, *([] if self.last_output is None else [self.last_output])]
        return torch.cat([states[layer] for layer in layers], dim=-1) if layers else self.head_input

    @property
    def drafter_input(self) -> DrafterInput:
        """Input of the drafter as its checkpoint says."""
        features_RF = self.features(self.drafter.config.feature_layers)
        rows = Rows(self.drafter)
        return DrafterInput(rows, rows, features_RF, self._prefill.input_ids, self.next_token)

    def trace(self, changed: DrafterInput | None = None, last: str | None = None) -> dict[str, torch.Tensor]:
        """Run the drafter over the prompt and its first drafts: all tensors in their order, the target's first.

        last: tensor that may be the last one.
        """
        run = changed or self.drafter_input
        batch = self._batch
        columns = torch.arange(len(run.input_ids_R) + 1)
        next_tokens = torch.tensor([run.next_token])
        self._pools.record(self._row, columns, torch.cat([run.input_ids_R, next_tokens]))
        prefill = replace(self._prefill, input_ids=run.input_ids_R)
        tensors = {**self._target, "target/features": run.features_RF}
        if last in tensors:
            return tensors
        extend = self._recorder(run.context, "extend", last)
        draft = self._recorder(run.drafting, "draft", last)
        with torch.no_grad(), suppress(Reached):
            with extend:
                state = self._make(run.context).seed(batch, prefill, next_tokens, run.features_RF, self._pools)
            with draft:
                self._make(run.drafting).propose(batch, state, self._pools)
        tensors |= self._with_ids(extend.tensors, run.context) | self._with_ids(_joined(draft.tensors), run.drafting)
        return tensors

    def _recorder(self, rows: Rows, phase: str, last: str | None) -> TensorRecorder:
        return TensorRecorder({**self.target_checkpoint.tensors, **rows.drafter.tensors}, phase, rows, last)

    def _make(self, rows: Rows) -> Any:
        from specsim.reference.drafters import make_drafter

        return make_drafter(rows.drafter, self._engine.target, self._engine.config, Placement(self.dtype))

    def _with_ids(self, tensors: Tensors, rows: Rows) -> dict[str, torch.Tensor]:
        """Add what the target's vocabulary makes of each row of logits: logits of all its tokens, and the best one."""
        d2t = rows.drafter.tensors.get("d2t")
        named: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            named[name] = tensor
            if not name.endswith("/lm_head") or "markov_head.markov_w2.weight" in rows.drafter.tensors:
                continue
            ids = torch.arange(tensor.shape[-1])
            if d2t is not None:
                ids = (ids + d2t) % self.target_checkpoint.config.vocab_size
                logits_RV = tensor.new_full((len(tensor), self.target_checkpoint.config.vocab_size), -torch.inf)
                logits_RV[:, ids] = tensor
                named[name.replace("lm_head", "target_logits")] = logits_RV
            named[name.replace("lm_head", "draft_ids")] = ids[tensor.argmax(-1)]
        return named


def _joined(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Join logits that were made one row at a time from the rows of one forward."""
    joined: dict[str, torch.Tensor] = {}
    forward = ""
    for name, tensor in tensors.items():
        phase, _, part = name.partition("/")
        forward = phase if f"{phase}/embed_tokens" in tensors or not forward else forward
        path = f"{forward}/{part}"
        joined[path] = torch.cat([joined[path], tensor]) if path in joined else tensor
    return joined


def in_dtype(checkpoint: Any, dtype: torch.dtype) -> Any:
    """Convert the weights of a target or a drafter; a tied head stays the embedding."""
    converted = {id(x): x.to(dtype) if x.is_floating_point() else x for x in checkpoint.tensors.values()}
    return replace(checkpoint, tensors={name: converted[id(x)] for name, x in checkpoint.tensors.items()})
