"""Requests with a common prefix, served by a scheduler with audits."""

import torch

from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.serving.generation import load_engine
from specsim.serving.requests import Request, make_requests
from specsim.serving.scheduler import Scheduler

PREFIX = tuple(range(3, 13))
PREFIXED = [(*PREFIX, 20), (*PREFIX, 21, 22), (*PREFIX, 20, 5, 6), (9, 8)]
SAMPLING = SamplingParams(max_new_tokens=13)


def served(pair: Pair, config: SpecConfig, setting: dict, options: EngineOptions) -> tuple[Scheduler, list[Request]]:
    """Serve PREFIXED, which arrive one after another. setting: fields of ServingConfig."""
    engine = load_engine(pair, config, options)
    requests = make_requests(pair, PREFIXED, SAMPLING, None, engine.config.length_limit)
    for place, request in enumerate(requests):
        request.arrival = 2 * place
    scheduler = Scheduler(engine, ServingConfig(**{"num_slots": 640} | setting), audits=True)
    for request in requests:
        scheduler.submit(request)
    with torch.inference_mode():
        scheduler.run()
    scheduler.close()
    return scheduler, requests
