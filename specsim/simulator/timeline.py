"""Continuous batching on a clock: order of service, seconds of every step, time of every token.

Steps are those of serving.scheduler: arrivals, room for the next round (or preemption), admission, chunks of prompts,
one round of the running requests. Under `overlap` a step is planned before the results of the one before it are known,
so a request that has ended takes part in one more round. The cost model gives the seconds of a step.
"""

from collections.abc import Sequence

import numpy as np

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.policies.per_request import AnyPolicy
from specsim.core.policies.policy import Always
from specsim.simulator.columns import round_pages
from specsim.simulator.initial_state import PREFILLS, Prefill, Simulation
from specsim.simulator.option import Cost, Option
from specsim.simulator.results import Run
from specsim.simulator.server import Server
from specsim.simulator.workload import Workload


def simulate(
    cost: Cost,
    options: Option | Sequence[Option],
    workload: Workload,
    serving: ServingConfig | None = None,
    *,
    prefill: Prefill = "mixed",
    policy: AnyPolicy | None = None,
    seed: int = 0,
    log: bool = False,
) -> Run:
    """Serve a workload; the same arguments give the same run, bit for bit.

    prefill: prompts are processed in the round's own forward (`mixed`, as in vLLM), in a separate forward of the same
    step before the round (`beside`, as in serving.scheduler), or in a forward that rounds wait for (`first`, as in
    SGLang). policy: chooses among several options. log: keep a record of every step. serving: by default 256 places,
    slots for all, and the cost model's schedule.
    """
    options = (options,) if isinstance(options, Option) else tuple(options)
    if serving is None:
        serving = ServingConfig(getattr(cost, "schedule", "sync"), max_running=256, num_slots=2**31 - 1)
    check(cost, options, workload, serving, prefill)
    return Server(Simulation(cost, options, workload, serving, prefill, policy or Always(), seed, log)).serve()


def check(cost: Cost, options: Sequence[Option], workload: Workload, serving: ServingConfig, prefill: str) -> None:
    """Raise InputError for a workload or a setting that simulate cannot serve."""
    require_choice("prefill", prefill, PREFILLS)
    if not options or len({option.config.page_size for option in options}) != 1:
        raise InputError("options", f"{len(options)} settings", "at least one, all of one page_size")
    require(not serving.prefix_cache, "prefix_cache", True, "False: requests of a workload have lengths and no tokens")
    schedule = getattr(cost, "schedule", serving.schedule)
    require(schedule == serving.schedule, "schedule", serving.schedule, f"that of the cost model, {schedule}")
    if serving.schedule == "overlap" and any(option.config.release == "round" for option in options):
        raise InputError("schedule", "overlap", "sync with release 'round', which frees slots after every round")
    configs = tuple(option.config for option in options)
    page = configs[0].page_size
    # Lanes' copies of a prefix's tail grow with it: a round from the last token of a page may need most pages.
    last = workload.prompt_tokens + np.maximum(workload.output_tokens - 2, 0)
    fullest = np.maximum(last - last % page - 1, workload.prompt_tokens)
    most = np.maximum(round_pages(last, configs), round_pages(fullest, configs)) * page
    if most.max() > serving.num_slots:
        request = int(most.argmax())
        raise InputError("num_slots", serving.num_slots, f"at least {most[request]}, which request {request} needs")
