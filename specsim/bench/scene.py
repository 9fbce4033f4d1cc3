"""Requests with committed KV, ready for timed rounds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from specsim.core.columns import two_rounds
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine import Engine
from specsim.core.kinds import DEFAULT, KINDS
from specsim.core.pair import Pair
from specsim.core.phases import AutoregressiveInput, Batch, DraftInput, PrefillInput, RoundOutput, Verdict
from specsim.core.pool import KVPool
from specsim.serving.generation import load_engine

PLAIN = SpecConfig.plain()
SPECULATIVE = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8)
DRAFTER = KINDS[DEFAULT].title  # of timed speculative rounds
SLACK = 256  # tokens that a request may grow by during the timing


@dataclass(frozen=True, slots=True)
class Scene:
    """Inputs of a round."""

    pair: Pair
    engine: Engine
    pools: KVPool
    batch: Batch
    draft_input: DraftInput
    prompts: list[list[int]] | None = None  # tokens of the KV; None where it is random

    def round(self) -> RoundOutput:
        """Run the next round of these requests, always the same one."""
        return self.engine.round(self.batch, self.draft_input, self.pools, reserved=True)

    def following(self, count: int) -> Iterator[Verdict]:
        """Run `count` consecutive rounds, each enqueued without waiting for the last one."""
        batch = self.batch
        draft_input = self.draft_input
        for _ in range(count):
            advance = self.engine.advance(batch, draft_input, self.pools, reserved=True)
            draft_input = advance.draft_input
            batch = advance.batch
            yield advance.verdict

    def rounds(self, count: int) -> None:
        """Run `count` consecutive rounds without reading their results."""
        for _ in self.following(count):
            pass

    def again(self, count: int) -> None:
        """Enqueue the same round `count` times without reading its results."""
        for _ in range(count):
            self.engine.advance(self.batch, self.draft_input, self.pools, reserved=True)

    @torch.inference_mode()
    def replay(self) -> None:
        """Replay only the round's graph, on the states in its buffers."""
        engine: Any = self.engine
        frames = engine._frames  # only the fast engine has them
        frame = min((frame for frame in frames if frame.bucket >= self.batch.size), key=lambda frame: frame.bucket)
        next(iter(frame.recordings.values())).graph.replay()


def prefilled(
    pair: Pair,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    temperature: float = 0.0,
    slack: int = SLACK,
) -> Scene:
    """Make requests by a real prefill of these prompts."""
    prompts = [list(prompt) for prompt in prompts]
    longest = max(map(len, prompts)) + slack
    pools = engine.make_pools(
        len(prompts), len(prompts) * two_rounds(longest, engine.config, engine.drafter.num_mask_rows)
    )
    batch = _batch(engine, pools, [len(prompt) for prompt in prompts], longest, temperature)
    with torch.inference_mode():
        output = engine.prefill(batch, PrefillInput.of_prompts(prompts).to(engine.device), pools)
    return Scene(pair, engine, pools, batch, output.draft_input, prompts)


def invented(pair: Pair, engine: Engine, pools: KVPool, requests: int, seq_len: int) -> Scene:
    """Make requests over the KV that the pools hold, with random first drafts, at temperature 0."""
    batch = _batch(engine, pools, [seq_len] * requests, seq_len, 0.0)
    device = engine.device
    bonus_tokens = torch.arange(1, requests + 1, dtype=torch.int32, device=device)
    if engine.config.is_plain:
        return Scene(pair, engine, pools, batch, DraftInput(bonus_tokens))
    topk = engine.config.topk
    first = torch.arange(topk, device=device).expand(requests, topk).contiguous()
    score = 0.1 if engine.config.score == "prob" else math.log(0.1)
    drafter: Any = engine.drafter
    hidden_size: int = drafter.hidden_size  # which every drafter with weights has
    draft_input = AutoregressiveInput(
        topk_scores=torch.full((requests, topk), score, device=device),
        topk_index=first,
        hidden=torch.randn(requests, hidden_size, device=device, dtype=engine.dtype),
        bonus_tokens=bonus_tokens,
    )
    return Scene(pair, engine, pools, batch, draft_input)


def close(scene: Scene) -> None:
    """Release the requests' columns to their pools."""
    for row in scene.batch.req_pool_indices.tolist():
        scene.pools.close(row)


def with_graph(scene: Scene, graph: Literal["eager", "step", "phase", "round"]) -> Scene:
    """Replace the engine by one in that graph mode; requests and pools stay."""
    old = scene.engine
    options = replace(old.options, graph=graph, bucket=scene.batch.size)
    engine = load_engine(scene.pair, old.config, options, acceptance=old.acceptance)
    return replace(scene, engine=engine)


def _batch(engine: Engine, pools: KVPool, seq_lens: list[int], longest: int, temperature: float) -> Batch:
    rows = [pools.open() for _ in seq_lens]
    for row in rows:
        columns = two_rounds(longest, engine.config, engine.drafter.num_mask_rows)
        pools.reserve(row, min(columns, pools.req_to_token.shape[1]))
    params = [SamplingParams(temperature=temperature)] * len(rows)
    vocab_size = engine.target.config.vocab_size
    return Batch.of(list(range(len(rows))), rows, seq_lens, params, vocab_size).to(engine.device)


def tree_of(config: SpecConfig) -> str:
    """Print (topk, num_steps, num_draft_tokens) for a table."""
    return "plain" if config.is_plain else f"({config.topk}, {config.num_steps}, {config.num_draft_tokens})"


def stacked(pair: Pair) -> Pair:
    """Replace the target's projections of the same input by views of one tensor, so that no engine copies them.

    The pair's own mapping is changed: no other holder of the pair keeps a second copy.
    """
    from specsim.fast.layers import FUSED

    tensors = pair.target.tensors
    if not isinstance(tensors, dict):
        raise TypeError("the tensors of a random pair are a dict")
    for parts in FUSED.values():
        for first in [name for name in tensors if name.endswith(f".{parts[0]}.weight")]:
            names = [first.replace(parts[0], part) for part in parts]
            joined = torch.cat([tensors[name] for name in names])
            rows = [len(tensors[name]) for name in names]
            tensors.update(zip(names, joined.split(rows), strict=True))
    return pair
