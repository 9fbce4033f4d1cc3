"""Comparison of a batched request with the same request solo: tokens, end, rounds and logprobs."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.core.policies.fields import TREE
from specsim.core.settings import Settings
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.grid_run import check
from specsim.serving.generation import generate
from specsim.serving.outputs import Output
from specsim.serving.requests import Request

# Largest error of a logprob, by the dtype of the weights: logprobs themselves are kept in float32.
BUDGETS = {torch.float64: 2e-6, torch.float32: 1e-4}
DECIDED = ("token_ids", "accepted", "finish_reason")  # fields in which no rounding shows but that of a decision


class SoloDifference(NamedTuple):
    """A field in which a batched request differs from its solo run."""

    field: str
    batched: Any
    solo: Any

    def __str__(self) -> str:
        return f"{self.field} is {self.batched}, solo {self.solo}"


class SoloResult(NamedTuple):
    """Result of comparing one request."""

    verdict: str  # `equal`, `different`, or `within rounding error`, which is a decision's
    difference: str | None = None  # a sentence, None where equal


@dataclass(frozen=True, slots=True)
class SoloComparison:
    """Results of comparing the requests of one run."""

    num_compared: int  # requests that were compared with their solo runs
    within_rounding_error: tuple[int, ...]  # ids of requests that differ where a decision is within rounding error
    differences: tuple[str, ...]  # a sentence for each other request that differs
    max_logprob_error: float  # over the equal requests

    @property
    def num_equal(self) -> int:
        """Number of requests equal to their solo runs."""
        return self.num_compared - len(self.within_rounding_error) - len(self.differences)


@dataclass(frozen=True, slots=True)
class SoloRuns:
    """Solo runs under one setting, each run once, to compare batched requests with."""

    pair: Pair
    config: SpecConfig
    dtype: torch.dtype  # of the batched runs
    options: EngineOptions | None = None  # of the solo runs; None: the reference in float64
    compared: tuple[str, ...] = DECIDED  # fields that have to be equal, besides logprobs
    settings: Settings | None = None  # of batched runs that switched: a solo run has each round's setting again
    outputs: dict[tuple[int, ...], Output] = field(default_factory=dict)

    @property
    def num_solo(self) -> int:
        """Number of solo runs so far."""
        return len(self.outputs)

    def output(self, request: Request) -> Output:
        """Give the solo output; a turn after an aborted one has a prompt that varies from run to run."""
        script = () if self.settings is None else (*request.settings, *request.draft_steps)
        key = (request.request_id, *request.prompt_ids, -1, *script)
        if key not in self.outputs:
            self.outputs[key] = run_solo(self.pair, self.config, request, self.options, self.settings)
        return self.outputs[key]

    def compare(self, requests: Iterable[Request]) -> SoloComparison:
        """Compare every request with its solo run."""
        setting = (self.pair, self.config)
        results = [
            (request, check_request(*setting, request, self.output(request), self.dtype, self.compared))
            for request in requests
        ]
        errors = [
            abs(batched - solo)
            for request, result in results
            if result.verdict == "equal"
            for batched, solo in zip(request.logprobs, self.output(request).logprobs, strict=False)
        ]
        return SoloComparison(
            num_compared=len(results),
            within_rounding_error=tuple(
                request.request_id for request, result in results if result.verdict == "within rounding error"
            ),
            differences=tuple(result.difference or "" for _, result in results if result.verdict == "different"),
            max_logprob_error=max(errors, default=0.0),
        )


def run_solo(
    pair: Pair,
    config: SpecConfig,
    request: Request,
    options: EngineOptions | None = None,
    settings: Settings | None = None,
) -> Output:
    """Serve the request by itself, from its whole prompt on; options None: the reference in float64.

    settings: of a run that switched between them; every round then has the setting that it had there.
    """
    options = options or EngineOptions(dtype=torch.float64)
    arguments = {"request_ids": [request.request_id], "engine": options}
    if settings is not None and request.settings:
        arguments["adaptive"] = _script(settings, request)
    return generate(pair, [request.prompt_ids], config, request.params, **arguments).outputs[0]


def _script(settings: Settings, request: Request) -> dict[str, Any]:
    """Make the policy that repeats a request's rounds."""
    trees = [{name: getattr(config, name) for name in TREE} for config in settings]
    script: list[Any] = [settings[choice].num_steps for choice in request.settings]
    if not request.draft_steps:
        return {"policy": "scripted", "settings": trees, "script": script}
    pairs = list(zip(script, request.draft_steps, strict=True))
    first = -request.request_id % len(pairs)  # the request's id is where it starts
    script = [list(pair) for pair in pairs[first:] + pairs[:first]]
    return {"policy": "scripted", "settings": trees, "script": script, "per_request": True}


def check_request(
    pair: Pair,
    config: SpecConfig,
    request: Request,
    output: Output,
    dtype: torch.dtype,
    compared: Collection[str] = DECIDED,
) -> SoloResult:
    """Compare a request served in this dtype with `output`, its solo run.

    The verdict is `within rounding error` only in float32, if tokens, rounds or the end differ and a decision of the
    request is within rounding error. A logprob that differs, or any difference in float64, is `different`.
    """
    first_difference = difference(request, output, BUDGETS[dtype], compared)
    if first_difference is None:
        return SoloResult("equal")
    may_round = dtype == torch.float32 and bool(decided_differences(request, output, compared))
    is_excused = may_round and is_within_rounding_error(pair, config, request, dtype)
    return SoloResult("within rounding error" if is_excused else "different", first_difference)


def difference(request: Request, output: Output, budget: float, compared: Collection[str] = DECIDED) -> str | None:
    """Name the first difference: tokens, rounds, end, a logprob by more than budget, side outputs; None where equal."""
    decided = decided_differences(request, output, compared)
    text = str(decided[0]) if decided else _measured(request, output, budget) or _delivered(request, output, budget)
    return text and f"request {request.request_id}: {text}"


def decided_differences(request: Request, output: Output, compared: Collection[str] = DECIDED) -> list[SoloDifference]:
    """List differences in tokens, rounds and end; an aborted request has to be the beginning of its solo run."""
    is_cut = request.finish_reason == "abort"
    count = len(request.token_ids) if is_cut else None
    rounds = len(request.accepted) if is_cut else None
    fields = [
        SoloDifference("token_ids", tuple(request.token_ids), output.token_ids[:count]),
        SoloDifference("accepted", tuple(request.accepted), output.num_accepted_tokens_per_round[:rounds]),
    ]
    if not is_cut:
        fields.append(SoloDifference("finish_reason", request.finish_reason, output.finish_reason))
    return [field for field in fields if field.field in compared and field.batched != field.solo]


def _measured(request: Request, output: Output, budget: float) -> str | None:
    """Name the first logprob that differs, where the tokens are equal."""
    if len(request.logprobs) != len(request.token_ids):
        return f"{len(request.logprobs)} logprobs of {len(request.token_ids)} tokens"
    for index, (served, expected) in enumerate(zip(request.logprobs, output.logprobs, strict=False)):
        if not abs(served - expected) <= budget:  # also where served is NaN
            return f"{SoloDifference(f'logprob {index}', served, expected)}, allowed {budget:.0e} apart"
    return None


def _delivered(request: Request, output: Output, budget: float) -> str | None:
    """Name the first side output that differs; in float32 rounding may have chosen other experts of one token."""
    if request.finish_reason == "abort":
        return None
    allowed = 0 if budget <= BUDGETS[torch.float64] else 1
    for name, expected in output.side_outputs.items():
        served = request.side_outputs.get(name)
        if served is None or served.shape != expected.shape:
            shape = "missing" if served is None else f"of shape {tuple(served.shape)}"
            return str(SoloDifference(f"side output {name}", shape, f"of shape {tuple(expected.shape)}"))
        places = (served != expected).flatten(1).any(1).nonzero()[:, 0].tolist()
        if len(places) > allowed:
            values = (outputs[places[0]].tolist() for outputs in (served, expected))
            return str(SoloDifference(f"side output {name} of token {places[0]}", *values))
    return None


def is_within_rounding_error(
    pair: Pair, config: SpecConfig, request: Request, dtype: torch.dtype = torch.float32
) -> bool:
    """Whether a decision of the solo request is within rounding error in this dtype, by the differential's rules."""
    cell = Cell(
        id=f"request {request.request_id}",
        pair="",
        prompts=(tuple(request.prompt_ids),),
        sampling=(request.params,),
        request_ids=(request.request_id,),
        config=config,
        rounds=request.max_tokens,
    )
    return check(cell, impl="reference", dtype=str(dtype).removeprefix("torch."), pair=pair).within_rounding_error > 0
