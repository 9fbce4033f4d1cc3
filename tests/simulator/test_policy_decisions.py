"""Policies in the scheduler and in the simulator: on one recorded run they choose the same settings."""

import numpy as np
import pytest
import torch

from specsim import SpecConfig
from specsim.bench.simulated import difference, serve, simulated
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.policies.named import named_policy
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.generation import load_adaptive_engine
from specsim.simulator.workload import SimulatedWorkload, closed_loop

SECONDS = {"0": [1.0, 1.2, 3.0], "1": [1.1, 1.5, 4.5], "3": [1.2, 2.4, 9.0]}
RULE = {"update_interval": 2, "warmup_batches": 3, "ema_alpha": 0.4}
POLICIES = {
    "moving average": {"policy": "moving-average", "steps": [0, 1, 3], **RULE},
    "by size": {"rules": {"1": {"candidate_steps": [1, 3]}, "3": {"candidate_steps": [0, 1]}}, **RULE},
    "table": {"policy": "table", "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 3, 1], [4, 8, 0]]},
    "goodput": {"policy": "goodput", "batch_sizes": [1, 3, 5], "seconds": SECONDS, "weight": 0.3},
    "moving average per request": {"policy": "moving-average", "steps": [0, 1, 3], "per_request": True, **RULE},
    "goodput per request": {
        "policy": "goodput",
        "batch_sizes": [1, 3, 5],
        "seconds": SECONDS,
        "weight": 0.3,
        "per_request": True,
        "row_seconds": 0.05,
    },
}
SERVING = {
    "sync": ServingConfig("sync", 5, 148, chunk_tokens=11, preemption="longest"),
    "overlap": ServingConfig("overlap", 5, 148, chunk_tokens=11, preemption="shortest"),
}


@pytest.mark.every_value
@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_decisions_on_a_recorded_run_are_equal(name, topk, serving):
    given = POLICIES[name] if "policy" in POLICIES[name] else {"policy": "moving-average", **POLICIES[name]}
    policy = named_policy(given, SpecConfig(topk, 3, page_size=4, max_len=64))
    engine = load_adaptive_engine(make_pair("eagle-noisy"), policy.settings, EngineOptions(dtype=torch.float64))
    lengths = closed_loop(20, 1, (3, 30), (1, 20))
    work = SimulatedWorkload(lengths.prompt_tokens, lengths.output_tokens, np.arange(20) * 2.5)
    served = serve(engine, work, SERVING[serving], policy.make())
    run = simulated(engine, work, SERVING[serving], served, policy.make())
    assert difference(served, run) == ""
    chosen = [setting for setting in served.settings if setting >= 0]
    assert len(set(chosen)) > 1
