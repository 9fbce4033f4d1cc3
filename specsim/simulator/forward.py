"""One forward of one model: products, attention, launches, and exchanges between GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import Hardware
from specsim.simulator.layers import Layers
from specsim.simulator.model import Model, expected_experts
from specsim.simulator.quantization import HALF, MXFP4, WeightFormat

LOGIT_BYTES = 12  # written and read in 16 bits, written and read again in 32
STEP_KERNELS = 3  # embedding, product, choice
HEAD_KERNELS = 4  # embedding, last norm, head, choice


def padded(size: int, buckets: Sequence[int] | None) -> tuple[int, bool]:
    """Find the rows that a batch is padded to, and whether a graph holds them."""
    if buckets is None:
        return size, True
    fitting = [bucket for bucket in buckets if bucket >= size]
    return (fitting[0], True) if fitting else (size, False)


@dataclass(frozen=True, slots=True)
class Forward:
    """Seconds of a model's forwards on each of `parallel` GPUs, which share heads, widths, experts, vocabulary."""

    hardware: Hardware
    model: Model
    efficiency: Efficiency
    parallel: int = 1
    dtype: str = "bfloat16"  # of the activations
    graph: bool = True

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on one GPU."""
        return self.model.bytes / self.parallel

    @property
    def kv_bytes(self) -> float:
        """Bytes of a token's KV on one GPU; every GPU holds the parts that cannot be split."""
        return sum(group.count * self._kv_bytes(group) for group in self.model.layers)

    @property
    def launching(self) -> float:
        """Seconds of the host for launching all kernels, the least of a forward; 0 in a graph."""
        return 0.0 if self.graph else (self.kernels + self.model.eager_kernels) * self.efficiency.launch

    def products(self, rows: float, head_rows: float, entry: bool = False) -> float:
        """Compute the seconds of everything but reading KV, with gaps and exchanges; entry: through fc too."""
        model = self.model
        device = 0.0
        for group in model.layers:
            device += group.count * self._layer(group, rows)
        if entry:
            device += self._product(model.entry_weights, model.weight_format, rows)
        device += self._product(model.head_weights, HALF, head_rows)
        device += self._seconds(head_rows * model.vocab_size * LOGIT_BYTES / self.parallel, 0, self._rate(HALF))
        return device + self.kernels * self.efficiency.gap + self.exchanges(rows)

    def context(self, rows: float) -> float:
        """Compute the seconds in which a block drafter writes the keys and values of its context, fc included."""
        model = self.model
        device = self._product(model.entry_weights, model.weight_format, rows)
        for group in model.layers:
            weights = model.hidden_size * group.kv_width
            device += group.count * self._product(weights, model.weight_format, rows)
        return device + self.context_kernels * self.efficiency.gap

    def step(self, weights: int, rows: float) -> float:
        """Compute the seconds of a product between one draft and the next, whose logits are written again."""
        nbytes = rows * self.model.vocab_size * LOGIT_BYTES / self.parallel
        device = self._product(weights, HALF, rows) + self._seconds(nbytes, 0, self._rate(HALF))
        return device + STEP_KERNELS * self.efficiency.gap

    def column_seconds(self, rows: float) -> dict[int | None, float]:
        """Compute the seconds per column of the layers of each window, for `rows` rows of a request.

        Scores and sums are computed in the activations' dtype, whatever the format of the weights or of the KV.
        """
        seconds: dict[int | None, float] = {}
        for group in self.model.layers:
            layer_seconds = self._seconds(
                self._kv_bytes(group), rows * group.pair_flops / self.parallel, self._rate(HALF)
            )
            seconds[group.window] = seconds.get(group.window, 0.0) + group.count * layer_seconds
        return seconds

    def chunk_attention(self, new_tokens: np.ndarray, contexts: np.ndarray) -> float:
        """Compute the seconds in which chunks of prompts [B] attend to themselves and the columns before them [B]."""
        seconds = 0.0
        seen = {}
        for group in self.model.layers:
            if group.window not in seen:
                seen[group.window] = _seen(new_tokens, contexts, group.window)
            pairs, columns = seen[group.window]
            flops = pairs * group.pair_flops / self.parallel
            seconds += group.count * self._seconds(columns * self._kv_bytes(group), flops, self._rate(HALF))
        return seconds

    def _layer(self, group: Layers, rows: float) -> float:
        model = self.model
        seconds = self._product(group.attention_weights, model.weight_format, rows)
        seconds += self._product(group.dense_weights, model.weight_format, rows)
        if group.experts:
            touched = float(expected_experts(group.experts, group.experts_per_token, rows, model.skew))
            flops = 2 * rows * group.experts_per_token * group.expert_weights / self.parallel
            nbytes = touched * group.expert_weights * model.expert_format.bytes / self.parallel
            speed = self.efficiency.mxfp4_experts if model.expert_format == MXFP4 else self.efficiency.experts
            seconds += self._seconds(nbytes, flops, self._rate(model.expert_format)) / speed
        return seconds

    def _product(self, weights: int, format_: WeightFormat, rows: float) -> float:
        nbytes = weights * format_.bytes / self.parallel
        return self._seconds(nbytes, 2 * weights * rows / self.parallel, self._rate(format_))

    def _rate(self, format_: WeightFormat) -> float:
        """Look up the peak operations/s of products with weights of this format."""
        weight_dtype = format_.dtype
        return self.hardware.flops(
            weight_dtype if weight_dtype is not None and weight_dtype in self.hardware.peak_flops else self.dtype
        )

    def _seconds(self, nbytes: float, flops: float, rate: float) -> float:
        """Compute the seconds of reading and computing; the shorter is partly hidden behind the longer."""
        reading = nbytes / (self.hardware.bandwidth * self.efficiency.bandwidth)
        computing = flops / (rate * self.efficiency.compute)
        return max(reading, computing) + (1 - self.efficiency.overlap) * min(reading, computing)

    def _kv_bytes(self, group: Layers) -> float:
        return group.kv_width * self.model.kv_bytes / min(self.parallel, group.kv_parts)

    @property
    def kernels(self) -> int:
        """Number of launches of one forward."""
        return HEAD_KERNELS + sum(group.count * group.kernels for group in self.model.layers)

    @property
    def context_kernels(self) -> int:
        """Number of launches that write a block drafter's context: fc, norm, a product and a write of each layer."""
        return 2 + 2 * self.model.num_layers

    def exchanges(self, rows: float) -> float:
        """Compute the seconds of the sums over GPUs in every layer and of one gather, 0 on one GPU."""
        if self.parallel == 1:
            return 0.0
        return (2 * self.model.num_layers + 1) * self.exchange(rows * self.model.hidden_size * 2)

    def exchange(self, nbytes: float) -> float:
        """Compute the seconds of one sum over GPUs of parts of this size, along a ring."""
        sent = 2 * (self.parallel - 1) / self.parallel * nbytes
        return self.efficiency.collective + sent / self.hardware.interconnect


def _seen(new_tokens: np.ndarray, contexts: np.ndarray, window: int | None) -> tuple[float, float]:
    """Count pairs of a token and a column it sees, and columns read, of chunks after their contexts."""
    reach = contexts + (new_tokens + 1) / 2
    if window is None:
        return float(new_tokens @ reach), float(contexts.sum() + new_tokens.sum())
    columns = np.minimum(contexts, window) + new_tokens
    return float(new_tokens @ np.minimum(reach, window)), float(columns.sum())
