"""Sampling tests of running engines: all verifiers, sampling parameters and drafters, and controls to be rejected."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from tqdm.auto import tqdm

from specsim.core.engine_options import EngineOptions
from specsim.core.errors import require_choice, require_int
from specsim.core.provenance import now, versions
from specsim.core.rule import AcceptanceRule
from specsim.core.verifiers import VERIFIER_OF
from specsim.correctness.statistics.controls import CONTROLS, WrongEngine
from specsim.correctness.statistics.e_value import chi_square, ln_e_value
from specsim.correctness.statistics.power import detectable_distance
from specsim.correctness.statistics.report import SamplingTest, SamplingTests
from specsim.correctness.statistics.samples import Load, outputs, sample
from specsim.correctness.statistics.settings import CONFIGS, DRAFTER_SETTINGS, DRAFTERS, PLAIN, SETTINGS
from specsim.correctness.statistics.small_vocabulary import opposed
from specsim.serving.generation import kernel_device
from specsim.serving.outputs import Output

FALSE_ALARM = 1e-6
IMPLS = ("reference", "fast", "both")


def run_sampling_tests(
    verifier: str | AcceptanceRule | None = None,
    *,
    impl: str = "reference",
    tokens: int = 200_000,
    device: str | None = None,
    seed: int = 0,
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
