"""Graphs of the target's forward over short prompts, which runs faster than the host launches its kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specsim.core.phases import Batch, PrefillInput
from specsim.core.pool import KVPool
from specsim.core.target import Experts, ForwardOutput, LatentAttention, ModelConfig
from specsim.fast.model.metadata import AttentionMetadata, causal_metadata
from specsim.fast.runtime.graph import Graph, capture

# Longer prompts keep the device busy for longer than the host needs to launch them: 30 ms of an H200 for 1,024 tokens.
ROWS = (64, 128, 192, 256, 384, 512, 768, 1024)
REQUESTS = (1, 16)

Forward = Callable[[torch.Tensor, AttentionMetadata, KVPool], ForwardOutput]


def can_record(config: ModelConfig) -> bool:
    """Check whether rows of no request are harmless, as they are with dense layers and ordinary attention."""
    return not any(
        isinstance(layer.mlp, Experts) or isinstance(layer.attention, LatentAttention) for layer in config.layers
    )


@dataclass(frozen=True, slots=True)
class PromptGraph:
    """A recorded forward over static buffers; the rows behind the last chunk belong to a padded request."""

    input_ids: torch.Tensor  # i64 [R]
    slots: torch.Tensor  # i64 [R], -1 for a padded row, which writes nothing
    row_starts: torch.Tensor  # i64 [B+2]
    start_lens: torch.Tensor  # i64 [B+1]
    table_rows: torch.Tensor  # i64 [B+1], -1 for a padded request
    graph: Graph
    output: ForwardOutput

    @classmethod
    def record(cls, forward: Forward, num_rows: int, num_requests: int, pools: KVPool) -> "PromptGraph":
        """Record a forward over padded rows."""
        device = pools.req_to_token.device

        def buffer(size: int, value: int) -> torch.Tensor:
            return torch.full((size,), value, dtype=torch.int64, device=device)

        row_starts = buffer(num_requests + 2, num_rows)
        row_starts[0] = 0
        ids, slots = buffer(num_rows, 0), buffer(num_rows, -1)
        start_lens, table_rows = buffer(num_requests + 1, 0), buffer(num_requests + 1, -1)
        outputs: list[ForwardOutput] = []

        def work() -> None:
            metadata = causal_metadata(table_rows, start_lens, row_starts, num_rows, False, slots, pools)
            outputs[:] = [forward(ids, metadata, pools)]

        graph = capture(work, device)
        return cls(ids, slots, row_starts, start_lens, table_rows, graph, outputs[0])

    def run(self, batch: Batch, prefill: PrefillInput, slots_R: torch.Tensor) -> ForwardOutput:
        """Run the forward over real chunks; its output is valid until the next run."""
        rows = len(slots_R)
        for buffer, value, padding in (
            (self.input_ids, prefill.input_ids, 0),
            (self.slots, slots_R, -1),
            (self.start_lens, prefill.start_lens, 0),
            (self.table_rows, batch.req_pool_indices, -1),
            (self.row_starts, prefill.row_starts, len(self.slots)),
        ):
            buffer[: len(value)].copy_(value)
            buffer[len(value) :].fill_(padding)
        self.graph.replay()
        return ForwardOutput(self.output.hidden[:rows], self.output.features[:rows], {})


class PromptGraphs:
    """Recorded forwards by the numbers of rows and requests that they hold, each made when it is first needed."""

    def __init__(self, forward: Forward, rows: Sequence[int] = ROWS, requests: Sequence[int] = REQUESTS) -> None:
        self._forward = forward
        self._rows = rows
        self._requests = requests
        self._pools: KVPool | None = None
        self._graphs: dict[tuple[int, int], PromptGraph] = {}

    def run(self, batch: Batch, prefill: PrefillInput, slots_R: torch.Tensor, pools: KVPool) -> ForwardOutput | None:
        """Run chunks in the smallest graph that holds them, or return None where none does."""
        rows = next((rows for rows in self._rows if rows >= len(slots_R)), None)
        requests = next((requests for requests in self._requests if requests >= batch.size), None)
        if rows is None or requests is None or not len(slots_R):
            return None
        if self._pools is not pools:  # graphs of other pools would keep them alive
            self._pools = pools
            self._graphs.clear()
        if (rows, requests) not in self._graphs:
            self._graphs[rows, requests] = PromptGraph.record(self._forward, rows, requests, pools)
        return self._graphs[rows, requests].run(batch, prefill, slots_R)
