"""The simulator's event loop: its time on one core of the CPU, after checks of its steps."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specsim.bench.clock import timing
from specsim.bench.row import OURS, Check, Row, Target, Timing
from specsim.bench.scheduler_steps import difference, serve, simulated
from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.policies.policy import Always
from specsim.simulator import CostModel, hardware, model, steps
from specsim.simulator.acceptance import Option
from specsim.simulator.compiled import loop
from specsim.simulator.initial_state import Simulation
from specsim.simulator.results import Run
from specsim.simulator.server import Server
from specsim.simulator.workload import Workload, closed_loop, poisson

MODEL = "llama-3-8b"
GPU = "H100-SXM"
REQUESTS = 10_000
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
RATES = (40, 10, 4)  # requests a second: a saturated server, a busy one, one of small batches and many steps
MOST_SECONDS = 0.8  # of a core
SAMPLES = 5
PAIR = "eagle-noisy"  # small, as only its steps count
SCHEDULER = {
    "sync": ServingConfig("sync", 5, 148, chunk_tokens=11, preemption="longest"),
    "overlap": ServingConfig("overlap", 5, 148, chunk_tokens=11, preemption="shortest"),
}


def loop_rows(is_quick: bool) -> Iterator[Row]:
    """Time a workload without speculation, by rate of arrivals."""
    for rate in RATES[:1] if is_quick else RATES:
        simulation = _simulation(poisson(REQUESTS, rate, PROMPT_TOKENS, OUTPUT_TOKENS))
        setting = {"model": MODEL, "requests": REQUESTS, "rate": rate, "tokens": f"{PROMPT_TOKENS} + {OUTPUT_TOKENS}"}
        compiled = Server(simulation).serve()  # loads the loop
        check = _equal(Server(simulation, steps).serve(), compiled)
        if not check.passed:
            yield Row("event loop", setting, {OURS: check})
            continue
        times = timing([_seconds(simulation) * 1e6 for _ in range(SAMPLES)])
        yield Row(
            "event loop",
            setting,
            {OURS: check},
            {OURS: times},
            targets=(Target("seconds of a core", times.median_us / 1e6, MOST_SECONDS),),
            notes=_notes(simulation, compiled, times),
        )


def _simulation(workload: Workload) -> Simulation:
    serving = ServingConfig("overlap", 256, 2**31 - 1, 8192)
    cost = CostModel(hardware(GPU), model(MODEL))
    return Simulation(cost, (Option.plain(),), workload, serving, "mixed", Always(), seed=0, log=False)


def _seconds(simulation: Simulation) -> float:
    """Measure the CPU time of a run, with its results' arrays and quantiles."""
    fresh = replace(simulation, cost=_simulation(simulation.workload).cost)  # without remembered results
    before = time.process_time()
    Server(fresh).serve()
    return time.process_time() - before


def _notes(simulation: Simulation, run: Run, times: Timing) -> tuple[str, ...]:
    tokens = int(simulation.workload.output_tokens.sum())
    kind = "interpreted, as SPECSIM_COMPILED is 0 or numba is missing" if loop(tokens) is steps else "compiled"
    mean = run.rounds.sum() / run.num_steps
    return (f"{run.num_steps:,} steps of {mean:.1f} requests, {times.median_us / run.num_steps:.2f} us a step, {kind}",)


def _equal(interpreted: Run, compiled: Run) -> Check:
    """Compare all results of requests, and all figures, of the two loops."""
    names = ("arrivals", "firsts", "lasts", "first_steps", "last_steps", "rounds", "drafts", "preemptions")
    wrong = [name for name in names if getattr(interpreted, name).tobytes() != getattr(compiled, name).tobytes()]
    figures = zip(interpreted.metrics().items(), compiled.metrics().values(), strict=True)
    wrong += [name for (name, mine), its in figures if not np.array_equal(mine, its, equal_nan=True)]
    compared = "the interpreted loop's requests and figures, bit for bit"
    return Check(compared, float(len(wrong)), 0, f"{wrong[0]} differs" if wrong else "")


def scheduler_rows() -> Iterator[Row]:
    """Compare steps, preemptions and ends with those of the scheduler that serves requests."""
    import torch

    from specsim.core.engine_options import EngineOptions
    from specsim.correctness.differential.pairs import make_pair
    from specsim.serving.generation import load_engine

    config = SpecConfig(2, 3, 6, page_size=4, max_len=64)
    engine = load_engine(make_pair(PAIR), config, EngineOptions("reference", torch.float64))
    for schedule, serving in SCHEDULER.items():
        lengths = closed_loop(24, 1, (3, 30), (1, 20))
        work = Workload(lengths.prompt_tokens, lengths.output_tokens, np.arange(24) * 1.5)
        served = serve(engine, work, serving)
        run = simulated(engine, work, serving, served)
        check = Check("every step, preemption and end of the scheduler", 0, 0, difference(served, run))
        setting = {"schedule": schedule, "requests": len(work), "slots": serving.num_slots}
        notes = (f"{run.num_steps} steps, {run.preemptions.sum()} preemptions, {run.rounds.sum()} rounds of requests",)
        yield Row("steps of the scheduler", setting, {OURS: check}, notes=notes)
