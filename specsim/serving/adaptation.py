"""Choice of the setting of every round by a policy, from what the host has read."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from specsim.core.adaptive_engine import AdaptiveEngine
from specsim.core.config import SpecConfig
from specsim.core.display import figure, short_setting
from specsim.core.engine import Engine
from specsim.core.policies.named import NamedPolicy
from specsim.core.policies.policy import Always, AnyPolicy, Choice, choose, observe
from specsim.core.rank_group import RankGroup
from specsim.core.settings import Settings
from specsim.serving.requests import Request
from specsim.serving.runner import Delivery, Launched

_LEAST_SECONDS = 1e-9  # of a round, by a clock that did not advance


@dataclass(frozen=True, slots=True)
class Switching:
    """Settings of a run whose policy switched them."""

    policy: NamedPolicy
    rounds_by_setting: tuple[int, ...]  # (request, round) pairs
    accepted_by_setting: tuple[int, ...]  # tokens, bonus included
    switches: int  # rounds of the batch with another setting than the one before
    rounds_by_steps: tuple[int, ...] | None = None  # (request, round) pairs by the request's own draft steps

    @classmethod
    def of(cls, policy: NamedPolicy, requests: Sequence[Request], choices: Sequence[int]) -> Self:
        """Count the rounds of finished requests; choices: settings of the batch's rounds, in order."""
        rounds = [0] * len(policy.settings)
        accepted = [0] * len(policy.settings)
        for request in requests:
            for setting, count in zip(request.settings, request.accepted, strict=True):
                rounds[setting] += 1
                accepted[setting] += count
        switches = sum(before != now for before, now in pairwise(choices))
        by_steps = None
        if policy.is_per_request:
            most = max(config.num_steps for config in policy.settings)
            draft_steps = [steps for request in requests for steps in request.draft_steps]
            by_steps = tuple(map(draft_steps.count, range(most + 1)))
        return cls(policy, tuple(rounds), tuple(accepted), switches, by_steps)

    @property
    def mean_nodes(self) -> float:
        """Mean nodes of a tree, over all rounds."""
        total = sum(self.rounds_by_setting)
        nodes = zip(self.policy.settings, self.rounds_by_setting, strict=True)
        return sum(config.num_draft_tokens * rounds for config, rounds in nodes) / total if total else 1.0

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON value."""
        counts = {name: list(getattr(self, name)) for name in ("rounds_by_setting", "accepted_by_setting")}
        by_steps = self.rounds_by_steps and list(self.rounds_by_steps)
        return {"policy": self.policy.to_json(), **counts, "switches": self.switches, "rounds_by_steps": by_steps}

    def rows(self) -> list[tuple[str, str]]:
        """List (name, value) pairs for a table."""
        rows = [("policy", self.policy.name), ("switches", figure(self.switches, 0))]
        counts = zip(self.policy.settings, self.rounds_by_setting, self.accepted_by_setting, strict=True)
        for config, rounds, accepted in counts:
            length = f", accept length {figure(accepted / rounds)}" if rounds else ""
            rows.append((f"rounds: {short_setting(config)}", f"{figure(rounds, 0)}{length}"))
        for steps, rounds in enumerate(self.rounds_by_steps or ()):
            rows.append((f"rounds of requests with {steps} draft steps", figure(rounds, 0)))
        return rows


class Adaptation:
    """A policy that switches an engine between rounds.

    All requests of a round share its setting, within which a policy per request gives each its own draft steps. The
    policy learns what a round accepted when the host reads its result,
    junk rounds of requests that have ended included, as the simulator's policies do. Where ranks share a model, every
    rank's policy learns rank 0's seconds, so that all choose alike.
    """

    def __init__(self, engine: AdaptiveEngine, policy: AnyPolicy) -> None:
        self._engine = engine
        self._policy = policy
        self._ranks = RankGroup.joined(engine.options.tensor_parallel)
        self.choices: list[int] = []  # settings of all rounds, in order
        self._starts: dict[int, float] = {}  # seconds, by step of a round, until its result is read

    def choose(self, step: int, requests: Sequence[Request], now: float) -> Choice:
        """Switch to the setting of a step's round, and return the choice; without requests the last setting stays."""
        self._starts[step] = now
        if not requests:
            return Choice(self._engine.current)
        lengths = np.array([request.prefill_len for request in requests])
        choice = choose(self._policy, _ids(requests), lengths)
        self._engine.switch(choice.setting)
        self.choices.append(choice.setting)
        return choice

    def observe(self, launched: Launched, deliveries: Sequence[Delivery], now: float) -> None:
        """Tell the policy what a round accepted, and the seconds since it was launched."""
        start = self._starts.pop(launched.step, now) if launched.is_round else now
        if launched.is_round and deliveries:
            accepted = np.array([len(delivery.token_ids) - 1 for delivery in deliveries])
            seconds = max(now - start, _LEAST_SECONDS)
            if self._ranks is not None:
                seconds = self._ranks.gather_objects(seconds)[0]
            observe(self._policy, _ids(launched.requests), launched.choice, accepted, seconds)


def _ids(requests: Sequence[Request]) -> np.ndarray:
    return np.array([request.request_id for request in requests], dtype=np.int64)


def settings_of(engine: Engine) -> tuple[SpecConfig, ...]:
    """List the settings between which an engine switches, or the one that it has."""
    settings: Settings | None = getattr(engine, "settings", None)  # an engine of one setting has no such attribute
    return (engine.config,) if settings is None else settings.configs


def adaptation_of(engine: Engine, policy: AnyPolicy | None) -> Adaptation | None:
    """Make the adaptation of an engine with several settings, None for any other; without a policy the first stays."""
    switches: Any = engine
    return Adaptation(switches, policy or Always()) if hasattr(engine, "settings") else None
