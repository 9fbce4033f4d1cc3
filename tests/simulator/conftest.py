from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.cli.main import main
from specsim.core.errors import InputError
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.calibration.observation import AssumedAcceptance, Observation, Parameters
from specsim.simulator.efficiency import FrontEnd
from specsim.simulator.measurement import Report
from specsim.simulator.results import LATENCIES


class Ended(NamedTuple):
    status: int
    out: str
    err: str

    def refuses(self, name: str, value: object) -> bool:
        """Whether one error names this field and this value."""
        sentence = str(InputError(name, value, ""))
        return self.status == 2 and self.out == "" and self.err.count("\n") == 1 and f": {sentence}" in self.err


@pytest.fixture
def command(capsys):
    """The command line of specsim, run in this process."""

    def run(*words: str) -> Ended:
        with pytest.raises(SystemExit) as end:
            main(words)
        return Ended(end.value.code or 0, *capsys.readouterr())

    return run


PROMPT = 70


@dataclass(frozen=True)
class Log:
    """Requests as a server's client saw them, four at a time."""

    num_drafts: int
    times: list[np.ndarray]  # seconds of a request's deliveries since it was sent
    tokens: list[int]  # of each request
    accepted: list[int]  # drafts of each round
    duration: float

    @property
    def latencies(self) -> dict[str, np.ndarray]:
        """Milliseconds."""
        ttft = np.array([times[0] for times in self.times])
        e2e = np.array([times[-1] for times in self.times])
        gaps = np.concatenate([np.diff(times) for times in self.times])
        values = (ttft, (e2e - ttft) / (np.array(self.tokens) - 1), gaps, e2e)
        return {what: 1e3 * each for what, each in zip(LATENCIES, values, strict=True)}

    @property
    def rates(self) -> tuple[float, ...]:
        """Unconditional, by position."""
        accepted = np.array(self.accepted)
        return tuple(float(np.mean(accepted >= position)) for position in range(1, self.num_drafts + 1))

    @property
    def figures(self) -> dict[str, float]:
        output, prompts = sum(self.tokens), PROMPT * len(self.times)
        figures = {
            "Output Throughput (tok/s)": output / self.duration,
            "Request Throughput (req/s)": len(self.times) / self.duration,
            "Total Token Throughput (tok/s)": (output + prompts) / self.duration,
            "Spec Decode Accept Length": 1 + np.mean(self.accepted),
            "Spec Decode Accept Rate (%)": 100 * np.mean(self.accepted) / self.num_drafts,
        }
        for what, values in self.latencies.items():
            statistics = {"Mean": np.mean(values), "Median": np.median(values), "P99": np.percentile(values, 99)}
            figures |= {f"{how} {what} (ms)": float(value) for how, value in statistics.items()}
        return figures

    @property
    def report(self) -> Report:
        """Remove the figures that need counts and details."""
        totals = (4, self.duration, len(self.times), PROMPT * len(self.times), sum(self.tokens))
        return Report("a run", self.figures, *totals, self.rates)

    def result(self) -> dict[str, Any]:
        """The JSON of vLLM's client with --save-detailed; its last request has failed."""
        short = {"Output Throughput (tok/s)": "output_throughput", "Request Throughput (req/s)": "request_throughput"}
        short |= {"Total Token Throughput (tok/s)": "total_token_throughput"}
        short |= {"Spec Decode Accept Length": "spec_decode_acceptance_length"}
        short |= {"Spec Decode Accept Rate (%)": "spec_decode_acceptance_rate"}
        for how in ("Mean", "Median", "P99"):
            names = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "E2E Latency": "e2el"}
            short |= {f"{how} {what} (ms)": f"{how.lower()}_{name}_ms" for what, name in names.items()}
        return {theirs: self.figures[ours] for ours, theirs in short.items()} | {
            "duration": self.duration,
            "completed": len(self.times),
            "total_input_tokens": PROMPT * len(self.times),
            "total_output_tokens": sum(self.tokens),
            "max_concurrency": 4,
            "spec_decode_num_drafts": len(self.accepted),
            "spec_decode_draft_tokens": self.num_drafts * len(self.accepted),
            "spec_decode_accepted_tokens": sum(self.accepted),
            "spec_decode_per_position_acceptance_rates": list(self.rates),
            "input_lens": [PROMPT] * len(self.times) + [PROMPT],
            "output_lens": [*self.tokens, 0],
            "ttfts": [*(float(times[0]) for times in self.times), 0.0],
            "itls": [*(np.diff(times).tolist() for times in self.times), []],
            "latencies": [*(float(times[-1]) for times in self.times), 0.5],
            "errors": [*("" for _ in self.times), "503 Service Unavailable"],
        }

    def printed(self, tool: str) -> str:
        """The text that a client prints, with its lines and decimals."""
        e2e = {"vllm": "E2EL", "sglang": "E2E Latency"}[tool]
        lines = ["Namespace(backend='openai', max_concurrency=4)", "=" * 12 + " Serving Benchmark Result " + "=" * 12]
        counts = {"Successful requests": len(self.times), "Total input tokens": PROMPT * len(self.times)}
        counts |= {"Total generated tokens": sum(self.tokens)}
        figures = {"Benchmark duration (s)": self.duration}
        for what in ("Output token", "Request", "Total token"):
            unit = "req/s" if what == "Request" else "tok/s"
            (name,) = (name for name in self.figures if name.startswith(what.split()[0]))
            figures[f"{what} throughput ({unit})"] = self.figures[name]
        if tool == "sglang":
            lines += [f"{'Backend:':<40} sglang", f"{'Traffic request rate:':<40} inf"]
            counts |= {"Max request concurrency": 4, "Total generated tokens (retokenized)": 1}
            in_flight = self.figures["Mean E2E Latency (ms)"] / 1e3 * len(self.times) / self.duration
            figures |= {"Concurrency": in_flight, "Accept length": self.figures["Spec Decode Accept Length"]}
        else:
            counts |= {"Failed requests": 1, "Maximum request concurrency": 4}
        for what in LATENCIES:
            for how in ("Mean", "Median", "P99"):
                name = f"{how} {what.replace('E2E Latency', e2e)} (ms)"
                figures[name] = self.figures[f"{how} {what} (ms)"]
        if tool == "vllm":
            figures |= {"Acceptance rate (%)": self.figures["Spec Decode Accept Rate (%)"]}
            figures |= {"Acceptance length": self.figures["Spec Decode Accept Length"]}
            counts |= {"Drafts": len(self.accepted), "Draft tokens": self.num_drafts * len(self.accepted)}
            counts |= {"Accepted tokens": sum(self.accepted)}
            figures |= {f"  Position {position}": 100 * rate for position, rate in enumerate(self.rates)}
        lines += [f"{name + ':':<40} {count:<10}" for name, count in counts.items()]
        lines += [f"{name + ':':<40} {figure:<10.2f}" for name, figure in figures.items()]
        return "\n".join([*lines, "=" * 50, "Stopping profiler...", "Drafts: 1", ""])


def _log(num_drafts: int, lengths: tuple[int, int], seed: int = 0, round_seconds: float = 0.008) -> Log:
    """A closed loop of 4 clients, rounds of 8 ms that accept each draft at 0.6."""
    rng, clocks = np.random.default_rng(seed), np.zeros(4)
    times, tokens, accepted = [], [], []
    for client in np.arange(40) % 4:
        length, since = rng.integers(*lengths), [rng.uniform(0.02, 0.09)]
        given = 1
        while given < length:
            drafts = int(np.argmin(np.append(rng.random(num_drafts) < 0.6, False)))
            accepted.append(drafts)
            given = min(length, given + drafts + 1)
            since.append(since[-1] + round_seconds * rng.uniform(0.9, 1.3))
        clocks[client] += since[-1]
        times.append(np.array(since))
        tokens.append(int(length))
    return Log(num_drafts, times, tokens, accepted, float(clocks.max()))


@pytest.fixture
def log():
    """A log of requests with (num_drafts, (least, most) tokens, seed)."""
    return _log


@pytest.fixture
def served():
    """The report computed from such a log."""
    return lambda *arguments: _log(*arguments).report


TRUE = {"bandwidth": 0.7, "compute": 0.35, "overlap": 0.6, "gap": 8e-6, "draft_step": 1.5e-4}
ACCEPT_LENGTHS = {0: 1.0, 1: 1.7, 3: 2.5, 6: 3.1}  # by steps


@dataclass(frozen=True)
class KnownServer:
    """A server whose parameters are known, and its cells as a benchmark would measure them."""

    cost: CostModel
    true: dict[str, float]

    def cell(self, batch: int, steps: int, rng: np.random.Generator, noise: float = 0.01) -> Observation:
        config = SpecConfig(1, steps, steps + 1) if steps else SpecConfig.plain()
        quantity = "decode_tokens_per_s"
        label = f"{steps} steps, batch {batch}"
        made = Observation(label, config, batch, ACCEPT_LENGTHS[steps], 512, 256, {quantity: 1.0})
        own = Parameters.of(self.true).cost(self.cost if steps else replace(self.cost, drafter=None), False)
        figure = made.predict(own, FrontEnd(), AssumedAcceptance())[quantity]
        return replace(made, figures={quantity: figure * float(np.exp(noise * rng.standard_normal()))})


@pytest.fixture(scope="session")
def calibrated_cost() -> CostModel:
    target = model("llama-3.1-8b")
    return CostModel(hardware("H100-SXM"), target, drafter("eagle3", target, 32000))


@pytest.fixture(scope="session")
def known_server(calibrated_cost):
    """A function of changed parameters and of a cost model that makes a server."""
    return lambda cost=calibrated_cost, **values: KnownServer(cost, TRUE | values)


@pytest.fixture(scope="session")
def grid(known_server):
    """Cells of a grid of batch sizes and steps."""
    rng = np.random.default_rng(0)
    server = known_server()
    return [server.cell(batch, steps, rng) for batch in (1, 4, 16, 64, 256) for steps in ACCEPT_LENGTHS]
