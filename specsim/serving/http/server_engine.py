"""The engine of a server, whose requests choose their draft steps and their grammars."""

from collections.abc import Sequence

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.grammar import Grammar
from specsim.core.pair import Pair
from specsim.core.policies.per_request import covering
from specsim.core.policies.policy import Choice
from specsim.core.settings import Settings
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.serving.generation import load_adaptive_engine


class LiveGrammars(dict[int, Grammar]):
    """Grammars of the running requests, which an engine reads in every round, also while there are none."""

    def __bool__(self) -> bool:
        return True


class RequestedSteps:
    """The policy by which every request has the draft steps that it asks for."""

    def __init__(self, settings: Sequence[SpecConfig]) -> None:
        self.most = max(config.num_steps for config in settings)
        self.requested: dict[int, int] = {}  # by request id; the others draft as many as they can
        self._settings = settings

    def choose_requests(self, requests: np.ndarray, contexts: np.ndarray) -> Choice:
        steps = [self.requested.get(int(request), self.most) for request in requests]
        return covering(self._settings, np.array(steps, dtype=np.int64))

    def observe_requests(self, requests: np.ndarray, choice: Choice, accepted: np.ndarray, seconds: float) -> None:
        pass


def load_server_engine(
    pair: Pair, config: SpecConfig, options: EngineOptions, acceptance: SyntheticAcceptance | None = None
) -> Engine:
    """Make the engine of a server, which requests can narrow or turn speculation off for, and constrain by grammars."""
    settings = Settings.of_steps(config, sorted({0, config.num_steps}))
    grammars = None if acceptance is not None else LiveGrammars()
    return load_adaptive_engine(pair, settings, options, acceptance=acceptance, grammars=grammars)
