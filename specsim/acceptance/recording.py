"""Recordings of a drafter's candidates at every position of its target's texts, for the simulator.

The run accepts no draft, so that a round begins at every position; its tokens are still the target's own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import require
from specsim.core.pair import Pair
from specsim.core.phases import Advance, DraftInput
from specsim.core.phases import Candidates as RoundCandidates
from specsim.core.pool import KVPool
from specsim.core.state import Batch
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.serving.generation import load_engine, run_together
from specsim.serving.requests import make_requests
from specsim.simulator.replay import RecordedCandidates


class CandidateRecorder:
    """A wrapper of an engine that keeps the candidates of every round."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.rounds: list[RoundCandidates] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        """Run a round, keep its candidates, and return the result for a serving loop."""
        output = self._engine.round(batch, draft_input, pools, reserved)
        if isinstance(output.verify_input.candidates, RoundCandidates):
            self.rounds.append(output.verify_input.candidates)
        return output.advance(batch)


def record(
    pair: Pair,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    config: SpecConfig,
    positions: int,
    dtype: torch.dtype = torch.float64,
) -> RecordedCandidates:
    """Record the candidates at `positions` positions of each prompt's greedy continuation, on the reference.

    Position 0 follows the first new token. End tokens are ignored. InputError for a prompt that leaves no room.
    """
    require(not config.is_plain, "num_steps", config.num_steps, "at least 1: plain decoding has no drafts")
    require(positions >= 1, "positions", positions, "at least 1")
    most = most_positions(pair, prompts, config)
    allowed = f"at most {most}, so that the longest prompt, its continuation and {config.num_steps} drafts fit"
    require(positions <= most, "positions", positions, f"{allowed} in {_limit(pair, config)} tokens")
    new_tokens = positions + config.num_steps
    none_accepted = SyntheticAcceptance((0.0,) * config.num_steps)
    engine = load_engine(pair, config, EngineOptions("reference", dtype), acceptance=none_accepted)
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    requests = make_requests(pair, prompts, sampling, None, engine.config.length_limit)
    recorder: Any = CandidateRecorder(engine)  # forwards all other attributes to the engine
    with torch.inference_mode():
        run_together(recorder, requests)
    rounds = recorder.rounds[:positions]
    return RecordedCandidates(
        tokens=_by_request([candidates.tokens for candidates in rounds]),
        scores=_by_request([candidates.scores for candidates in rounds]),
        parent_list=_by_request([candidates.parent_list for candidates in rounds]),
        texts=tuple(np.array(request.token_ids) for request in requests),
        topk=config.topk,
        num_steps=config.num_steps,
    )


def most_positions(pair: Pair, prompts: Sequence[str] | Sequence[Sequence[int]], config: SpecConfig) -> int:
    """Count the positions that can be recorded after the longest prompt; InputError where there is none."""
    limit = _limit(pair, config)
    requests = make_requests(pair, prompts, None, None, limit)
    require(requests, "prompts", prompts, "at least one prompt")
    longest = max(len(request.prompt_ids) for request in requests)
    most = limit - config.num_steps - longest
    allowed = f"at most {limit - config.num_steps - 1}, which leaves room for a position and its drafts"
    require(most >= 1, "prompt", f"{longest} tokens", allowed)
    return most


def _limit(pair: Pair, config: SpecConfig) -> int:
    """Give the largest number of tokens of a request."""
    return config.within(pair.target.config.max_position_embeddings).length_limit


def _by_request(rounds: list[torch.Tensor]) -> np.ndarray:
    """Reorder rows of rounds [B, X] to the positions of one request after the other, [B · rounds, X]."""
    return torch.stack(rounds, dim=1).flatten(0, 1).numpy()
