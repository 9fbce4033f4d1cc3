"""Sampling tests of running engines: all verifiers, sampling parameters and drafters, and controls to be rejected."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from tqdm.auto import tqdm

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import require_choice, require_int
from specsim.core.limits import Seed, TokenCount
from specsim.core.phases import Batch, Verdict
from specsim.core.pool import KVPool
from specsim.core.provenance import now, versions
from specsim.core.rule import AcceptanceRule
from specsim.core.uniforms import accept_uniforms, draft_uniforms, final_uniforms
from specsim.core.verifiers import DEFAULT_VERIFIER, KIND_OF, VERIFIER_KINDS, VERIFIER_OF
from specsim.correctness.statistics.e_value import chi_square, detectable_distance, ln_e_value
from specsim.correctness.statistics.report import SamplingTest, SamplingTests
from specsim.correctness.statistics.samples import (
    CONFIGS,
    DRAFTER_SETTINGS,
    DRAFTERS,
    PLAIN,
    SETTINGS,
    Load,
    outputs,
    sample,
)
from specsim.correctness.statistics.small_vocabulary import KIND, opposed
from specsim.correctness.wrong_rules import at_least
from specsim.serving.generation import kernel_device
from specsim.serving.outputs import Output

_REFERENCE = "specsim.reference"
# The first of four lanes, whose KV already lies in the path's place, is seldom the accepted one.
_LANES = SpecConfig(topk=4, num_steps=2, num_draft_tokens=9, page_size=4, verifier=VERIFIER_OF["siblings"])
FALSE_ALARM = 1e-6
IMPLS = ("reference", "fast", "both")


@dataclass(frozen=True, slots=True)
class WrongEngine:
    """A wrong engine."""

    name: str
    config: SpecConfig
    replaced: str | None = None  # function of the reference; None where the config itself is wrong
    wrong: Callable[..., Any] | None = None  # function in its place
    tokens: int = 2304  # enough for it to be rejected
    kind: str = KIND  # of drafter

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Give the reference the error within a context."""
        if self.replaced is None:
            yield
            return
        with patch(self.replaced, self.wrong):
            yield


def _final_uniforms_of_no_round(seeds: Tensor, request_ids: Tensor, root_lens: Tensor) -> Tensor:
    """Return the same uniform for every bonus token of a request."""
    return final_uniforms(seeds, request_ids, torch.zeros_like(root_lens))


def _draft_uniforms_of_no_round(
    seeds: Tensor, request_ids: Tensor, root_lens: Tensor, depth: int, num_lanes: int
) -> Tensor:
    """Return the same uniforms for the drafts of every round."""
    return draft_uniforms(seeds, request_ids, torch.zeros_like(root_lens), depth, num_lanes)


def _final_uniforms_of_the_draft(seeds: Tensor, request_ids: Tensor, root_lens: Tensor) -> Tensor:
    """Draw the bonus token with the uniform of the round's first draft."""
    return draft_uniforms(seeds, request_ids, root_lens, 0, 1)[:, 0]


def _no_residual(prob_V: Tensor, _draft_prob_V: Tensor) -> Tensor:
    """Return the target's own distribution after a rejection, as if nothing had been rejected."""
    return prob_V


def _no_commit(_batch: Batch, _locations: Tensor, _verdict: Verdict, _pools: KVPool) -> None:
    """Leave the accepted path's KV where the tree wrote it."""


def _draft_uniforms_of_accept(
    seeds: Tensor, request_ids: Tensor, root_lens: Tensor, depth: int, num_lanes: int
) -> Tensor:
    """Draw drafts with the uniforms that accept them."""
    return accept_uniforms(seeds, request_ids, root_lens, depth)[:, depth:].expand(-1, num_lanes)


_KIND = KIND_OF[VERIFIER_OF["sampled"]]
_CHAIN = CONFIGS[_KIND.name]
_LOSSY = next(kind.name for kind in VERIFIER_KINDS if not kind.is_lossless)
_FINAL = "specsim.core.uniforms.final_uniforms"
_DRAFTED = f"{_REFERENCE}.drafting.draft_uniforms"
CONTROLS = (
    WrongEngine("typical acceptance", replace(CONFIGS[DEFAULT_VERIFIER], verifier=_LOSSY)),
    WrongEngine("accept if target ≥ draft", _CHAIN, _KIND.reference.replace(":", "."), at_least),
    WrongEngine("no residual after a rejection", _CHAIN, f"{_REFERENCE}.acceptance.residual", _no_residual),
    WrongEngine("one uniform for draft and bonus", _CHAIN, _FINAL, _final_uniforms_of_the_draft, 4608),
    WrongEngine("a bonus uniform for all rounds", _CHAIN, _FINAL, _final_uniforms_of_no_round),
    WrongEngine("draft uniforms for all rounds", CONFIGS["block"], _DRAFTED, _draft_uniforms_of_no_round, 4608),
    WrongEngine("one stream for draft and accept", _CHAIN, _DRAFTED, _draft_uniforms_of_accept, kind="standalone"),
    WrongEngine("KV of the accepted path not moved", _LANES, f"{_REFERENCE}.kv.commit", _no_commit, 13824),
)


@check_arguments
def run_sampling_tests(
    verifier: str | AcceptanceRule | None = None,
    *,
    impl: str = "reference",
    tokens: TokenCount = 200_000,
    device: str | None = None,
    seed: Seed = 0,
    progress: bool = False,
) -> SamplingTests:
    """Test one verifier, which may be a rule of your own, or all verifiers, other drafters and the controls.

    tokens: least number for each implementation, divided among verifiers and settings. device: for the fast
    implementation. The controls run on the reference.
    """
    engines = _engines(impl, device)
    rule = verifier if isinstance(verifier, AcceptanceRule) else None
    if isinstance(verifier, AcceptanceRule):
        configs = {verifier.name: CONFIGS[VERIFIER_OF[verifier.drafts]]}
    elif verifier is not None:
        require_choice("verifier", verifier, CONFIGS)
        configs = {verifier: CONFIGS[verifier]}
    else:
        configs = CONFIGS
    require_int("tokens", tokens)
    date = now()
    start = time.perf_counter()
    others = DRAFTERS if verifier is None else {}
    num_tests = len(configs) * len(SETTINGS) + len(others) * len(DRAFTER_SETTINGS)
    bound = FALSE_ALARM / (len(engines) * num_tests)
    share = math.ceil(tokens / num_tests)
    loads = [
        (name, Load(config, SETTINGS, share, seed, engine, rule))
        for engine, (name, config) in product(engines, configs.items())
    ]
    loads += [
        (name, Load(config, DRAFTER_SETTINGS, share, seed, engine, kind=kind))
        for engine, (name, (kind, config)) in product(engines, others.items())
    ]
    wrong = CONTROLS if verifier is None else ()
    controls = [(control, Load(control.config, [PLAIN], control.tokens, seed, kind=control.kind)) for control in wrong]
    total = sum(load.total for _, load in (*loads, *controls))
    with tqdm(total=total, unit="token", disable=None if progress else True) as bar:
        rows = [row for name, load in loads for row in _tests(name, load, bound, bar.update)]
        rows += [row for control, load in controls for row in _control_tests(control, load, bound, bar.update)]
    seconds = time.perf_counter() - start
    return SamplingTests(tuple(rows), seed, FALSE_ALARM, seconds, date, versions(engines[-1].device or "cpu"))


def _engines(impl: str, device: str | None) -> list[EngineOptions]:
    require_choice("impl", impl, IMPLS)
    if impl == "reference":
        return [EngineOptions(device=device)]
    fast = EngineOptions("fast", device=kernel_device(device))
    return [fast] if impl == "fast" else [EngineOptions(), fast]


def _tests(name: str, load: Load, bound: float, progress: Callable[[int], Any]) -> Iterator[SamplingTest]:
    """Make a row for each setting of a load."""
    model = opposed()
    outputs_by_name = outputs(model, load, progress)
    for setting in load.settings:
        tested = sample(model, setting, outputs_by_name[setting.name])
        rounds = _rounds(outputs_by_name[setting.name])
        yield SamplingTest(
            name=name,
            impl=load.engine.impl,
            sampling=setting.name,
            tokens=len(tested),
            round_starts=int(tested.is_first.sum()),
            accept_length=sum(rounds) / len(rounds),
            ln_e_value=ln_e_value(tested),
            chi_square=chi_square(tested),
            bound=bound,
            detectable_distance=detectable_distance(tested, bound),
        )


def _control_tests(
    control: WrongEngine, load: Load, bound: float, progress: Callable[[int], Any]
) -> list[SamplingTest]:
    with control.injected():
        return [replace(row, is_control=True) for row in _tests(control.name, load, bound, progress)]


def _rounds(outputs: Sequence[Output]) -> list[int]:
    return [count for output in outputs for count in output.num_accepted_tokens_per_round]
