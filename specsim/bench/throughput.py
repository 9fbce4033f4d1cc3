"""Serving throughput of a closed loop of clients over the real scheduler, with the simulator's prediction."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
import torch

from specsim.bench.baselines import likeliest
from specsim.bench.clock import METHOD, busy_share, walled
from specsim.bench.closed_loop import ClosedLoop, check_schedules, check_served, figures_of, warmed_run
from specsim.bench.contest import Contender, contest
from specsim.bench.predicted import FREE, Predictions, ServedLoad, costs_of
from specsim.bench.request_lengths import Lengths, kept_lengths
from specsim.bench.roofline import Peaks, prefill_bound
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing, all_of
from specsim.bench.scene import DRAFTER, prefilled, stacked, tree_of
from specsim.core.config import SpecConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.kinds import DEFAULT
from specsim.core.pair import Pair
from specsim.core.phases import PrefillInput, PrefillOutput
from specsim.core.provenance import versions
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.models.shapes import random_pair, random_prompts
from specsim.serving.generation import load_engine
from specsim.simulator.calibration.posterior import most_informative
from specsim.simulator.hardware import reported_hardware
from specsim.simulator.model import model

PLAIN = SpecConfig.plain(16)
SPECULATIVE = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=16)  # a chain, for all depths to be there
RATES = (0.85, 0.65, 0.5)  # of synthetic acceptance: an accept length of 3.0
CHUNK = 8192
REQUESTS = {1: 4, 4: 12, 16: 40, 64: 112, 256: 320}  # by concurrency
QUICK = {1: 3, 16: 32}
SCHEDULES: tuple[Literal["sync", "overlap"], ...] = ("sync", "overlap")
FITTED = 3  # loads, chosen by what they can tell and not by what was measured
PROMPT = 128  # tokens of requests that only decode
CHECKED = 6  # rounds
PROFILED = 16  # steps
LONG_PROMPT = 8192
LEAST_DENSE = 0.6
PREFILL_SAMPLES = 5
LEAST_BUSY = 0.97
MOST_MEAN, MOST_WORST = 0.05, 0.12  # errors of predictions
EXPLAINED = (
    "figures of clients: tokens/s of all outputs, TPOT and TTFT means over requests, prompts included",
    METHOD,
    "acceptance is synthetic, at an accept length of 3.0; weights and prompts are random",
)


def prefill_rows(shape: str, peaks: Peaks) -> Iterator[BenchRow]:
    """Time the prefill of one long prompt, its KV and first token included, against the dense rate."""
    pair = stacked(random_pair(shape, "cuda", torch.bfloat16, None))
    engine = load_engine(pair, PLAIN, EngineOptions("fast", torch.bfloat16, "cuda", "round"))
    yield prefill_row(pair, engine, min(LONG_PROMPT, engine.config.length_limit - 2 * PLAIN.page_size), peaks)
    gc.collect()
    torch.cuda.empty_cache()


def prefill_row(pair: Pair, engine: Engine, tokens: int, peaks: Peaks) -> BenchRow:
    """Check the first token's logits by plain torch, and time a prefill from its launch to its end."""
    (prompt,) = random_prompts(1, tokens, pair.target.config.vocab_size)
    scene = prefilled(pair, engine, [prompt], slack=0)
    prefill_input = PrefillInput.of_prompts([prompt]).to(engine.device)

    @torch.inference_mode()
    def run() -> PrefillOutput:
        return engine.prefill(scene.batch, prefill_input, scene.pools)

    first = int(run().next_tokens[0])
    bound = prefill_bound(pair.target.config, tokens)
    contender = Contender(OURS, lambda _: [first], likeliest(pair, prompt), lambda: walled(run, PREFILL_SAMPLES, 1))
    limit = lambda times, bound, peaks: [  # noqa: E731
        PerformanceTarget(
            "time / dense products (60% of the dense rate)", times[OURS] / bound.compute_us(peaks), 1 / LEAST_DENSE
        )
    ]
    return contest("prefill", {"requests": 1, "tokens": tokens}, (contender,), bound, peaks, set_targets=limit)


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """A served load."""

    load: ServedLoad
    count: int  # requests
    check: Check
    busy: float | None  # share of the GPU's time while all requests decode; None where nothing measures it
    note: str


def serving_rows(shape: str, quick: bool) -> Iterator[tuple[BenchRow, ...]]:
    """Serve every load under both schedules, check them, and predict all from FITTED of them."""
    pair = stacked(random_pair(shape, "cuda", torch.bfloat16, DEFAULT))
    # One kind of forward for all batches, as the simulator knows one efficiency.
    options = EngineOptions("fast", torch.bfloat16, "cuda", "round", forward="kernels")
    measured: list[MeasuredLoad] = []
    for config in (PLAIN, SPECULATIVE):
        measured += measured_loads(pair, config, options, QUICK if quick else REQUESTS, kept_lengths())
        gc.collect()
        torch.cuda.empty_cache()
    drafter = pair.checkpoint
    yield tuple(rows_of(measured, predictions(measured, shape, drafter.config.draft_vocab_size if drafter else 0)))


def measured_loads(
    pair: Pair, config: SpecConfig, options: EngineOptions, counts: Mapping[int, int], lengths: Lengths
) -> Iterator[MeasuredLoad]:
    """Serve all loads of a setting by one engine."""
    rates = RATES[: config.num_steps]
    acceptance = None if config.is_plain else SyntheticAcceptance(rates)
    served_pair = replace(pair, drafter=None) if config.is_plain else pair
    engine = load_engine(served_pair, config, options, acceptance=acceptance)
    most = max(counts)
    loop = ClosedLoop.of(engine, lengths, most, CHUNK)
    for concurrency, count in sorted(counts.items(), reverse=True):
        served = {schedule: warmed_run(loop, schedule, concurrency, count) for schedule in SCHEDULES}
        with_tokens = engine.dtype == torch.float32
        same = check_served(
            "requests of the other schedule", served["overlap"].requests, served["sync"].requests, with_tokens
        )
        rounds = check_schedules(loop, concurrency, CHECKED, PROMPT)
        for schedule, run in served.items():
            check = all_of(f"{same.compared}; {rounds.compared}; {run.check.compared}", same, rounds, run.check)
            label = f"{tree_of(config)}, {concurrency}, {schedule}"
            serving = loop.serving(schedule, concurrency)
            load = ServedLoad.of(label, figures_of(run.requests), config, serving, lengths.first(count), rates)
            yield MeasuredLoad(load, count, check, _busy(loop, schedule, concurrency), run.note)


def _busy(loop: ClosedLoop, schedule: str, concurrency: int) -> float | None:
    """Measure the GPU's busy share over steps in which all requests decode."""
    if loop.engine.device.type != "cuda":
        return None
    decoding = loop.decoding(schedule, concurrency, 2 * PROFILED + 4, PROMPT)
    try:
        return busy_share(lambda: decoding.steps(PROFILED))
    finally:
        decoding.close()


def predictions(measured: Sequence[MeasuredLoad], shape: str, draft_vocab: int) -> Predictions | None:
    """Fit a profile to the most informative loads; None on a GPU that the simulator does not know."""
    gpu = reported_hardware(versions("cuda" if torch.cuda.is_available() else "cpu").get("gpu", ""))
    if gpu is None:
        return None
    loads = [measurement.load for measurement in measured]
    costs = costs_of(gpu, model(shape), draft_vocab)
    return Predictions.of(costs, loads, most_informative(costs, loads, FITTED, FREE))


def rows_of(measured: Sequence[MeasuredLoad], predicted: Predictions | None) -> Iterator[BenchRow]:
    """Make a row per load, and one of the predictions' errors."""
    by_label = {measurement.load.label: measurement for measurement in measured}
    for measurement in measured:
        load = measurement.load
        concurrency, schedule = load.serving.max_running, load.serving.schedule
        setting = {"tree": tree_of(load.config), "concurrency": concurrency, "schedule": schedule}
        figures = figures_by_name(load.figures)
        if measurement.busy is not None:
            figures["gpu_busy"] = measurement.busy
        targets = []
        if schedule == "overlap":
            other = by_label[f"{tree_of(load.config)}, {concurrency}, sync"].load
            figures["gain_over_sync"] = load.figures["tokens_per_s"] / other.figures["tokens_per_s"]
            if measurement.busy is not None:
                targets.append(
                    PerformanceTarget("GPU idle while decoding, share", 1 - measurement.busy, 1 - LEAST_BUSY)
                )
        notes = [*EXPLAINED, measurement.note]
        if predicted is not None:
            predicted_figures = asdict(predicted.figures[load.label])
            figures |= {f"predicted_{name}": value for name, value in figures_by_name(predicted_figures).items()}
            notes.append("a load that the profile is fitted to" if load.label in predicted.fitted else "held out")
        timings = {OURS: Timing(1e6 / load.figures["tokens_per_s"], 0.0, 1)} if measurement.check.passed else {}
        name = "serving, plain" if load.config.is_plain else f"serving, {DRAFTER}"
        yield BenchRow(
            name,
            setting | {"requests": measurement.count},
            {OURS: measurement.check},
            timings,
            targets=tuple(targets),
            notes=tuple(notes),
            figures=figures if measurement.check.passed else {},
        )
    if predicted is not None:
        yield _errors_row(measured, predicted)


def figures_by_name(figures: Mapping[str, float]) -> dict[str, float]:
    """Convert seconds to milliseconds, as tables have them."""
    return {
        (name.removesuffix("_s") + "_ms" if name in ("tpot_s", "ttft_s") else name): (
            1e3 * value if name in ("tpot_s", "ttft_s") else value
        )
        for name, value in figures.items()
    }


def _errors_row(measured: Sequence[MeasuredLoad], predicted: Predictions) -> BenchRow:
    """Summarise the errors of the loads that the fit did not see."""
    loads = [measurement.load for measurement in measured if measurement.load.label not in predicted.fitted]
    errors = {name: np.abs(values) for name, values in predicted.errors(loads).items()}
    figures = {}
    for name, values in errors.items():
        figures |= {f"mean_error_{name}": float(values.mean()), f"worst_error_{name}": float(values.max())}
    speeds = np.concatenate([errors[name] for name in ("tokens_per_s", "tpot_s")])
    targets = (
        PerformanceTarget("mean error, tokens/s and TPOT", float(speeds.mean()), MOST_MEAN),
        PerformanceTarget("worst error, tokens/s and TPOT", float(speeds.max()), MOST_WORST),
    )
    values = predicted.posterior.values
    notes = tuple(f"{name} {value:.4g}" for name, value in values.items())
    setting = {"fitted": len(predicted.fitted), "held out": len(loads)}
    return BenchRow("predictions of held-out loads", setting, {}, targets=targets, notes=notes, figures=figures)
