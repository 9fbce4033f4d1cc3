"""sglang#6995: Llama-2-70B on two H20, requests a second with three kinds of speculation and without."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal

import numpy as np

from specsim.core.config import SpecConfig
from specsim.simulator.cost import CostModel
from specsim.simulator.drafter import drafter
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import hardware
from specsim.simulator.model import model
from specsim.simulator.reproduce.reproduction import AccuracyTarget, Figure, Fitted, Reproduction, rows

SOURCE = "https://github.com/sgl-project/sglang/pull/6995"
TOKENS = 870  # of prompts and of outputs: uniform from 0.7 · 1024 to 1024
PLAIN = SpecConfig.plain()
SYNC_HOST = 1.1e-3  # sglang#11398: 2.99 tokens at 246.80/s in step, 3.01 at 273.43/s overlapped
MOST_ERROR = 0.10
LENGTHS = np.arange(1, 3.0005, 0.001)


def reproduce() -> Reproduction:
    """Fit one constant on `none`; then find the accept lengths that the other three rows allow."""
    table = {_label(row): row for row in rows("sglang_6995")}
    none, wide, pair, fused = (float(row["req_per_s"]) for row in table.values())
    running = min(range(1, 129), key=lambda count: abs(requests_per_s(None, PLAIN, "overlap", count)(1) - none))
    wide_rate = requests_per_s("eagle", SpecConfig(4, 2, 4), "sync", running)
    pair_rate = requests_per_s("eagle", SpecConfig(2, 1, 2), "sync", running)
    fused_rate = requests_per_s("eagle", SpecConfig(1, 1, 2), "overlap", running)
    base = requests_per_s(None, PLAIN, "overlap", running)(1)
    two = _allowed(LENGTHS[LENGTHS <= 2], base, none, {pair_rate: pair, fused_rate: fused})
    four = _allowed(LENGTHS, base, none, {wide_rate: wide})
    simulated = [base, wide_rate(four.value), pair_rate(two.value), fused_rate(two.value)]
    published = [none, wide, pair, fused]
    return Reproduction(
        "sglang_6995",
        SOURCE,
        _METHOD,
        _figures(list(table), published, simulated),
        (_running(none, running), two, four),
        _targets(published, simulated, two),
        (_limits(running), _gap(pair, fused, running), _crowded(none, fused)),
    )


Schedule = Literal["sync", "overlap"]
Rate = Callable[[float], float]  # requests a second at an accept length


@cache
def _cost(kind: str | None, schedule: Schedule) -> CostModel:
    target = model("llama-2-70b")
    head = None if kind is None else drafter(kind, target)
    host = Efficiency(host=SYNC_HOST) if schedule == "sync" else Efficiency()
    return CostModel(hardware("H20"), target, head, host, 2, schedule)


def requests_per_s(kind: str | None, config: SpecConfig, schedule: Schedule, running: int) -> Rate:
    """Make a function of the accept length: requests a second of a server with `running` requests.

    During one request the server prefills it, and runs a `running`-th of its rounds for each.
    """
    cost = _cost(kind, schedule)
    prefill = cost.prefill(np.array([TOKENS]), np.array([0]))
    round_ = cost.round(np.full(running, TOKENS + TOKENS // 2), config)
    return lambda length: 1 / (prefill + TOKENS / length * round_ / running)


def _allowed(lengths: np.ndarray, base: float, none: float, modes: Mapping[Rate, float]) -> Fitted:
    """Find the accept lengths at which every mode has its ratio to `none` within the limit, on the right side."""
    name = f"accept length, {'two' if len(modes) > 1 else 'four'} tokens"
    simulated = {published: np.array([rate(length) for length in lengths]) for rate, published in modes.items()}
    errors = np.max([np.abs(rates / base / (published / none) - 1) for published, rates in simulated.items()], axis=0)
    sides = np.all([(rates > base) == (published > none) for published, rates in simulated.items()], axis=0)
    is_allowed = (errors <= MOST_ERROR) & sides
    allowed = lengths[is_allowed]
    if not len(allowed):
        best = lengths[np.argmin(errors)]
        return Fitted(name, float(best), np.nan, np.nan, "tokens (no length is allowed)")
    best = allowed[np.argmin(errors[is_allowed])]
    return Fitted(name, float(best), float(allowed[0]), float(allowed[-1]), "tokens")


def _running(none: float, running: int) -> Fitted:
    fitting = [
        count for count in range(1, 129) if abs(requests_per_s(None, PLAIN, "overlap", count)(1) - none) <= ROUNDING
    ] or [running]
    return Fitted("requests running", running, fitting[0], fitting[-1], f"requests, at {none} ± {ROUNDING} a second")


def _figures(labels: list[str], published: list[float], simulated: list[float]) -> tuple[Figure, ...]:
    rates = [
        Figure(label, "requests/s", measured, predicted, "computed" if at else "fitted")
        for at, (label, measured, predicted) in enumerate(zip(labels, published, simulated, strict=True))
    ]
    ratios = [
        Figure(label, "over none", measured / published[0], predicted / simulated[0])
        for label, measured, predicted in zip(labels[1:], published[1:], simulated[1:], strict=True)
    ]
    return (*rates, *ratios)


def _targets(published: list[float], simulated: list[float], two: Fitted) -> tuple[AccuracyTarget, ...]:
    order = np.argsort(published).tolist() == np.argsort(simulated).tolist()
    worst = max(
        abs(predicted / simulated[0] / (measured / published[0]) - 1)
        for measured, predicted in zip(published, simulated, strict=True)
    )
    return (
        AccuracyTarget("order of the four rows", "right" if order else "wrong", order),
        AccuracyTarget("ratios to none", f"{worst:.1%} off at worst, target {MOST_ERROR:.0%}", worst <= MOST_ERROR),
        AccuracyTarget(
            "one accept length for both rows of two tokens", f"{two.low:.3f} to {two.high:.3f}", two.low <= two.high
        ),
    )


def _limits(running: int) -> str:
    cost = _cost("eagle", "overlap")
    contexts = np.full(running, TOKENS + TOKENS // 2)
    plain, tree = (cost.phases(contexts, config).verify for config in (PLAIN, SpecConfig(4, 2, 4)))
    gpu = cost.hardware
    rows = gpu.flops(cost.dtype) * cost.efficiency.compute / (gpu.bandwidth * cost.efficiency.bandwidth)
    return (
        "Verifying is not free on an H20: its bandwidth is an H200's class, its arithmetic a seventh of it, so that "
        f"{rows:.0f} rows already take as long as reading the weights. To verify four nodes of each of {running} "
        f"requests costs {tree / plain:.1f} plain steps."
    )


def _gap(pair: float, fused: float, running: int) -> str:
    """Describe the accept length and the longer round that would make the two rows of two tokens exact."""
    cost = _cost("eagle", "overlap")
    prefill = cost.prefill(np.array([TOKENS]), np.array([0]))
    round_ = cost.round(np.full(running, TOKENS + TOKENS // 2), SpecConfig(1, 1, 2))
    length = TOKENS * round_ / running / (1 / fused - prefill)
    slower = (1 / pair - prefill) * running * length / TOKENS
    return (
        f"To be exact in both rows of two tokens the accept length would be {length:.2f}, and a round that is not one "
        f"graph {(slower - round_) * 1e3:.0f} ms longer than one that is ({round_ * 1e3:.0f} ms); the cost of a host "
        f"in step that is known from elsewhere, {SYNC_HOST * 1e3:.1f} ms, explains only a part of that."
    )


def _crowded(none: float, fused: float) -> str:
    """Refute the other reading of the table: as many requests as memory holds."""
    cost = _cost(None, "overlap")
    flops = 2 * cost.model.active_parameters / (2 * cost.hardware.flops(cost.dtype))
    compute = 2 * TOKENS * flops * none
    length = 2 * TOKENS * flops / compute / (1 / fused - TOKENS * flops / compute)
    return (
        "How many requests run is not published. Were it as many as memory holds, both prefill and decoding would be "
        f"bound by arithmetic (at {compute:.0%} of the peak), and {fused} requests/s with two tokens a round would "
        f"take an accept length of {length:.2f}, more than two: so it was fewer, and that is the constant fitted."
    )


def _label(row: Mapping[str, str]) -> str:
    if row["method"] == "none":
        return "none"
    return f"{row['method']}, steps {row['num_steps']}, topk {row['topk']}, tokens {row['num_draft_tokens']}"


ROUNDING = 0.005
_METHOD = (
    "Two H20, tensor parallel 2, Llama-2-70B in bfloat16 with its EAGLE head; requests of 870 prompt and 870 output "
    "tokens on average. 1 parameter, the number of requests running, is fitted to 1 cell, the row without speculation; "
    "the other 3 rows are held out, except their accept lengths, which were not published: they are given as the "
    "intervals that agree with the table, one for both rows of two tokens. All else is the default of Efficiency, "
    "except 1.1 ms of host a round where the schedule is in step (sglang#11398); one fused graph counts as overlapped."
)
