"""Predictions of served loads by the simulator, under one cost profile that is fitted to a few of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np

from specsim.bench.closed_loop import Figures
from specsim.bench.request_lengths import Lengths
from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.kinds import DEFAULT
from specsim.simulator.acceptance import Option, PerPosition
from specsim.simulator.calibration.observation import AssumedAcceptance, Observation
from specsim.simulator.calibration.posterior import Posterior, fit, predict
from specsim.simulator.cost import CostModel
from specsim.simulator.drafter import drafter
from specsim.simulator.efficiency import FrontEnd
from specsim.simulator.hardware import Hardware
from specsim.simulator.model import Model
from specsim.simulator.server import simulate

FREE = ("bandwidth", "compute", "overlap", "gap", "launch", "host", "host_request", "host_drafts")
MOST_REQUESTS = 2**16


@dataclass(frozen=True)
class ServedLoad(Observation):
    """Measured figures of a closed loop, and the simulator's of the same requests."""

    lengths: Lengths | None = field(default=None, hash=False)
    serving: ServingConfig = field(default_factory=ServingConfig)
    rates: tuple[float, ...] = ()  # of synthetic acceptance

    @classmethod
    def of(
        cls, label: str, figures: Figures, config: SpecConfig, serving: ServingConfig, lengths: Lengths,
        rates: tuple[float, ...],
    ) -> "ServedLoad":  # fmt: skip
        """Describe a served load; its server is that of the schedule."""
        return cls(
            label,
            config,
            serving.max_running,
            1.0 + sum(rates[: config.num_steps]),
            round(float(lengths.prompt_tokens.mean())),
            round(float(lengths.output_tokens.mean())),
            asdict(figures),
            source=serving.schedule,
            lengths=lengths,
            serving=serving,
            rates=rates[: config.num_steps],
        )

    def predict(self, cost: CostModel, front: FrontEnd, acceptance: AssumedAcceptance) -> dict[str, float]:
        """Simulate the load."""
        assert self.lengths is not None
        option = Option(self.config, PerPosition(self.rates, "minimum-variance"))
        run = simulate(cost, option, self.lengths.closed_loop(self.serving.max_running), self.serving, prefill="beside")
        return asdict(Figures.of(self.lengths.output_tokens, run.arrivals, run.firsts, run.lasts))


def costs_of(gpu: Hardware, target: Model, draft_vocab: int) -> dict[str, CostModel]:
    """Make the servers of both schedules, whose graphs hold powers of two requests."""
    sizes = tuple(2**exponent for exponent in range(MOST_REQUESTS.bit_length()))
    cost = CostModel(gpu, target, drafter(DEFAULT, target, draft_vocab), buckets=sizes)
    return {"overlap": cost, "sync": replace(cost, schedule="sync")}


@dataclass(frozen=True, slots=True)
class Predictions:
    """A profile fitted to some loads, and the figures that it predicts for all."""

    posterior: Posterior
    figures: Mapping[str, Figures]  # by label
    fitted: tuple[str, ...]  # labels

    @classmethod
    def of(
        cls, costs: Mapping[str, CostModel], loads: Sequence[ServedLoad], fitted: Sequence[Observation]
    ) -> "Predictions":
        """Fit the parameters FREE to some of the loads."""
        posterior = fit(costs, fitted, FREE)
        rows = predict(costs, loads, posterior.values).reshape(len(loads), len(fields(Figures)))
        figures = {load.label: Figures(*values) for load, values in zip(loads, rows.tolist(), strict=True)}
        return cls(posterior, figures, tuple(load.label for load in fitted))

    def errors(self, loads: Sequence[ServedLoad]) -> dict[str, np.ndarray]:
        """Compute the relative errors of these loads by figure."""
        return {
            name: np.array([getattr(self.figures[load.label], name) / load.figures[name] - 1 for load in loads])
            for name in (figure.name for figure in fields(Figures))
        }
