"""A request's tokens are its own: what it gives in any company is what it gives alone."""

from dataclasses import dataclass

import torch

from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.grid_run import check
from specsim.serving.generation import Output, generate
from specsim.serving.requests import Request

# Largest error of a logprob, by the dtype of the weights: logprobs themselves are kept in float32.
BUDGETS = {torch.float64: 2e-6, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Judgement:
    """verdict: `equal`, `undecidable` or `different`. difference: what differs, in a sentence, None where equal."""

    verdict: str
    difference: str | None = None


def alone(pair: Pair, config: SpecConfig, request: Request, options: EngineOptions | None = None) -> Output:
    """Serve the request by itself, from its whole prompt on; options None: the reference in float64."""
    options = options or EngineOptions(dtype=torch.float64)
    ids = [request.request_id]
    return generate(pair, [request.prompt_ids], config, request.params, request_ids=ids, engine=options).outputs[0]


def judge(pair, config: SpecConfig, request: Request, output: Output, dtype: torch.dtype) -> Judgement:
    """Compare a request that was served in this dtype with itself alone, which is `output`.

    It is undecidable only in float32, where what differs was decided (tokens, rounds or the end) and a decision of the
    request is too close to call: never for a logprob alone, never in float64.
    """
    told = difference(request, output, BUDGETS[dtype])
    if told is None:
        return Judgement("equal")
    may_round = dtype == torch.float32 and _decided(request, output) is not None
    is_excused = may_round and is_undecidable(pair, config, request, dtype)
    return Judgement("undecidable" if is_excused else "different", told)


def difference(request: Request, output: Output, budget: float) -> str | None:
    """What parts a request from itself alone, in a sentence: tokens, end, rounds, or a logprob by more than budget.

    Of an aborted request what it has is compared with the beginning of what it gives alone.
    """
    told = _decided(request, output) or _measured(request, output, budget)
    return told and f"request {request.request_id}: {told}"


def _decided(request: Request, output: Output) -> str | None:
    """What of tokens, rounds and end differs."""
    count = len(request.token_ids) if request.finish_reason == "abort" else len(output.token_ids)
    rounds = len(request.accepted) if request.finish_reason == "abort" else len(output.num_accepted_tokens_per_round)
    pairs = {
        "token_ids": (tuple(request.token_ids), output.token_ids[:count]),
        "accepted": (tuple(request.accepted), output.num_accepted_tokens_per_round[:rounds]),
    }
    if request.finish_reason != "abort":
        pairs["finish_reason"] = (request.finish_reason, output.finish_reason)
    for name, (served, expected) in pairs.items():
        if served != expected:
            return f"{name} is {served}, alone {expected}"
    return None


def _measured(request: Request, output: Output, budget: float) -> str | None:
    """Which logprob differs, of a request whose tokens do not."""
    if len(request.logprobs) != len(request.token_ids):
        return f"{len(request.logprobs)} logprobs of {len(request.token_ids)} tokens"
    for place, (served, expected) in enumerate(zip(request.logprobs, output.logprobs, strict=False)):
        if not abs(served - expected) <= budget:  # also where it is not a number
            return f"logprob {place} is {served}, alone {expected}, allowed {budget:.0e} apart"
    return None


def is_undecidable(pair, config: SpecConfig, request: Request, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a decision of the request alone is too close to call in this dtype, by the rules of the differential."""
    cell = Cell(
        id=f"request {request.request_id}",
        pair="",
        prompts=(tuple(request.prompt_ids),),
        sampling=(request.params,),
        request_ids=(request.request_id,),
        config=config,
        rounds=request.max_tokens,
    )
    return check(cell, impl="reference", dtype=str(dtype).removeprefix("torch."), pair=pair).undecidable > 0
