"""Recording what a pair's drafter considers at every position of the texts that its target writes, for the simulator.

The run accepts no draft, so that a round begins at every position; its tokens are the target's own, as ever.
"""

from collections.abc import Sequence

import numpy as np
import torch

from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.phases import Advance
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.serving.generation import load_engine
from specsim.serving.requests import make_requests
from specsim.serving.scheduler import Scheduler
from specsim.simulator.replay import Candidates


class Recorder:
    """An engine that keeps the candidates of every round, and else is the one it was given."""

    def __init__(self, engine):
        self._engine, self.rounds = engine, []

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def advance(self, batch, draft_input, pools, reserved: bool = False) -> Advance:
        verify_input, output, next_input = self._engine.round(batch, draft_input, pools, reserved)
        self.rounds.append(verify_input.candidates)
        return Advance(output.verdict, next_input, batch.after(output.verdict.num_accepted_tokens))


def record(
    pair, prompts: Sequence, config: SpecConfig, positions: int, dtype: torch.dtype = torch.float64
) -> Candidates:
    """Candidates at this many positions of each prompt's greedy continuation, on the reference column.

    Position 0 follows the first new token. No end token ends a text. InputError for a prompt that leaves no room.
    """
    if config.is_plain:
        raise InputError("num_steps", config.num_steps, "at least 1: plain decoding drafts nothing")
    if positions < 1:
        raise InputError("positions", positions, "at least 1")
    new_tokens = positions + config.num_steps
    none_accepted = SyntheticAcceptance((0.0,) * config.num_steps)
    engine = Recorder(load_engine(pair, config, EngineOptions("reference", dtype), acceptance=none_accepted))
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    requests = make_requests(pair, prompts, sampling, None, engine.config.max_len)
    if not requests:
        raise InputError("prompts", prompts, "at least one prompt")
    for request in requests:
        if request.max_tokens < new_tokens:
            most = engine.config.max_len - new_tokens
            raise InputError(
                "prompt", f"{len(request.prompt_ids)} tokens", f"at most {most}, for {new_tokens} new ones"
            )
    _run(engine, requests, new_tokens)
    texts = tuple(np.array(request.token_ids) for request in requests)
    return Candidates(*_columns(engine.rounds[:positions]), texts, config.topk, config.num_steps)


def _run(engine: Recorder, requests: list, new_tokens: int) -> None:
    """All requests in one batch, in which they stay to the end: its rows keep their order."""
    longest = max(len(request.prompt_ids) for request in requests) + new_tokens
    room = len(requests) * engine.config.reserved_columns(longest)
    scheduler = Scheduler(engine, ServingConfig(max_running=len(requests), num_slots=room))
    with torch.inference_mode():
        for request in requests:
            scheduler.submit(request)
        scheduler.run()
        scheduler.close()


def _columns(rounds: list) -> tuple[np.ndarray, ...]:
    """Tokens, scores and parent lists of all positions, request after request."""
    columns = []
    for name in ("tokens", "scores", "parent_list"):
        by_round = np.stack([getattr(candidates, name).numpy() for candidates in rounds])
        columns.append(by_round.swapaxes(0, 1).reshape(-1, by_round.shape[-1]))
    return tuple(columns)
