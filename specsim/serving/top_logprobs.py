"""The most likely tokens at every place of an output, from the logits that an engine took its tokens from."""

from dataclasses import replace
from typing import Any

import torch

from specsim.core.engine import Engine
from specsim.core.phases import Advance, Batch, DraftInput, PrefillInput, PrefillOutput
from specsim.core.pool import KVPool
from specsim.serving.outputs import Generation


class TopLogprobs:
    """A wrapper of an engine that keeps the `count` most likely tokens behind every new one.

    Log probabilities are of the target alone, at the request's temperature: penalties, bias and grammars are not in
    them.
    """

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._count = count
        self._rows: dict[int, list[dict[int, float]]] = {}  # by request and place, log probabilities by token id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> PrefillOutput:
        """Run a chunk of every prompt twice, for the logits of its last row and as the engine does."""
        width = self._engine.target.config.hidden_size
        hidden = self._engine.hidden_states(batch, prefill, pools)[prefill.last_rows, -width:]
        logits_BV = self._engine.target.logits(hidden.contiguous())
        for index, request in enumerate(batch.request_ids.tolist()):
            self._rows[request] = self._likeliest(logits_BV[index : index + 1], batch, index)
        return self._engine.prefill(batch, prefill, pools)

    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        """Run a round, keep the tokens at its accepted nodes, and return the result for a serving loop."""
        output = self._engine.round(batch, draft_input, pools, reserved)
        verdict = output.verify_output.verdict
        counts = verdict.num_accepted_tokens.tolist()
        for index, request in enumerate(batch.request_ids.tolist()):
            nodes = verdict.accept_index[index, : counts[index]].long()
            self._rows[request] += self._likeliest(output.verify_output.target_logits[nodes], batch, index)
        return output.advance(batch)

    def _likeliest(self, logits_TV: torch.Tensor, batch: Batch, index: int) -> list[dict[int, float]]:
        temperature = float(batch.sampling.temperature[index]) or 1.0
        top = torch.log_softmax(logits_TV.double() / temperature, dim=-1).topk(self._count)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [dict(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows]

    def add_to(self, generation: Generation) -> Generation:
        """Add the tokens to the outputs of requests 0, 1, ..., whose last round may exceed them."""
        outputs = [
            replace(output, top_logprobs=tuple(self._rows[request][: len(output.token_ids)]))
            for request, output in enumerate(generation.outputs)
        ]
        return replace(generation, outputs=tuple(outputs))
