"""Conservation in random servers: every token, draft, column, page and second is counted once.

The expected run follows from the calls of a cost model and the drafts of every round, without the server's own counts.
"""

from dataclasses import dataclass, field, fields, replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsim import SpecConfig
from specsim.core.columns import round_columns
from specsim.core.config import ServingConfig
from specsim.core.kinds import SERVED
from specsim.core.policies.policy import Choice
from specsim.simulator import CostModel, Efficiency, drafter, hardware, model
from specsim.simulator.acceptance import (
    Callback,
    DraftAcceptance,
    DraftedRounds,
    Mixture,
    Option,
    RecordedAcceptance,
    iid,
    steady,
)
from specsim.simulator.model import Model
from specsim.simulator.results import LATENCIES, SPECULATION, STATISTICS, THROUGHPUTS, SimulatedRun
from specsim.simulator.runner import PREFILLS
from specsim.simulator.server import most_request_pages, simulate
from specsim.simulator.workload import SimulatedWorkload

LLAMA, GPU = model("llama-3-8b"), hardware("H100-SXM")
BLOCK = 64  # columns between the lengths of two requests, so that a length names its request
MOST_OUTPUT = 24


def accepted_drafts(request: int, position: int, most: int) -> int:
    return min((5 * request + 3 * position) % 7, most)


@dataclass
class CountedCost:
    """Notes every forward; its seconds are multiples of 2^-10, whose sums are exact."""

    calls: list[tuple[list[tuple[int, int]], list[int], SpecConfig | None, float]] = field(default_factory=list)

    def mixed(self, new_tokens, behind, contexts, config) -> float:
        chunks = [(int(start), int(start + new)) for start, new in zip(behind, new_tokens, strict=True)]
        seconds = 2.0**-4 + len(contexts) * 2.0**-8 + float(np.sum(new_tokens)) * 2.0**-10
        self.calls.append((chunks, np.asarray(contexts).tolist(), config, seconds))
        return seconds

    def prefill(self, new_tokens, behind) -> float:
        return self.mixed(new_tokens, behind, [], None)

    def round(self, contexts, config) -> float:
        return self.mixed([], [], contexts, config)


class Alternating:
    """A policy of requests that changes setting and steps from round to round, and notes what it observes."""

    def __init__(self, options: list[Option]) -> None:
        self._steps = [option.config.num_steps for option in options]
        self.choices: list[Choice] = []
        self.observed: list[tuple[list[int], int, list[int], float]] = []

    def choose_requests(self, requests, contexts) -> Choice:
        setting = len(self.choices) % len(self._steps)
        steps = np.minimum((requests + len(self.choices)) % 4, self._steps[setting])
        choice = Choice(setting, None if len(self.choices) % 3 else steps)
        self.choices.append(choice)
        return choice

    def observe_requests(self, requests, choice, accepted, seconds) -> None:
        self.observed.append((requests.tolist(), choice.setting, accepted.tolist(), seconds))


def random_workload(rng: np.random.Generator) -> SimulatedWorkload:
    count = int(rng.integers(1, 9))
    prompts = BLOCK * (8 + rng.permutation(count)) + rng.integers(0, 10, count)
    cached = rng.integers(0, prompts) * rng.integers(0, 2, count)
    arrivals = np.cumsum(rng.integers(0, 2, count) * rng.integers(0, 40, count)) * 2.0**-5
    return SimulatedWorkload(
        prompts,
        rng.integers(1, MOST_OUTPUT + 1, count),
        arrivals * rng.choice([0, 0, 1]),
        concurrency=rng.choice([None] * 6 + [1, 3]),
        intake=rng.choice([0.0, 2.0**-6, 0.25]),
        latency=rng.choice([0.0, 2.0**-5]),
        cached_tokens=cached if rng.integers(0, 2) else None,
    )


def random_option(rng: np.random.Generator, num_steps: int, page: int, release: str) -> Option:
    chain = SpecConfig(1, num_steps, num_steps + 1, page) if num_steps else SpecConfig.plain(page)
    config = SpecConfig(2, num_steps, num_steps + 2, page) if num_steps and rng.integers(0, 2) else chain

    def accepted(rounds: DraftedRounds) -> list[int]:
        pairs = zip(rounds.request_ids.tolist(), rounds.positions.tolist(), strict=True)
        return [accepted_drafts(*pair, num_steps) for pair in pairs]

    return Option(replace(config, release=release), Callback(accepted, num_steps))


def pages(length: int, options: list[Option]) -> int:
    """Most pages of a request in its next round, under any of the settings."""
    configs = [option.config for option in options]
    return max(-(-round_columns(length, config) // config.page_size) for config in configs)


def random_server(rng: np.random.Generator) -> dict:
    """Draw the arguments of simulate, except cost and policy; requests that fit outgrow most pools."""
    page = int(rng.choice([1, 1, 4, 16]))
    schedule = str(rng.choice(["sync", "overlap", "overlap"]))
    release = "finish" if schedule == "overlap" else str(rng.choice(["finish", "round"]))
    steps = (0, 3, 1) if rng.integers(0, 2) else (int(rng.integers(0, 5)),)
    options = [random_option(rng, num_steps, page, release) for num_steps in steps]
    work = random_workload(rng)
    least = int(most_request_pages(tuple(option.config for option in options), work).max()) * page
    fit = work.prompt_tokens[: rng.integers(1, 1 + len(work))]  # prompts that fit, with room for a few more tokens
    slots = sum(pages(int(prompt), options) for prompt in fit) * page + len(fit) * int(rng.integers(0, 8))
    serving = ServingConfig(
        schedule,
        int(rng.choice([1, 3, 8, 8, 8, 8, 8, 8])),
        max(least, slots),
        rng.choice([None, None, None, 40]),
        preemption=str(rng.choice(["latest", "shortest", "longest"])),
    )
    return {"options": options, "workload": work, "serving": serving, "prefill": str(rng.choice(PREFILLS))}


@dataclass
class Tally:
    """A run as the forwards of its steps tell it, arrays by request."""

    work: SimulatedWorkload
    options: list[Option]

    def __post_init__(self) -> None:
        count = len(self.work)
        self.numbers = {int(prompt) // BLOCK: number for number, prompt in enumerate(self.work.prompt_tokens)}
        self.firsts, self.lasts = np.full((2, count), np.nan)
        self.first_steps, self.last_steps, self.rounds, self.drafts = np.zeros((4, count), int)
        self.ahead, self.resumed, self.surplus = np.zeros((3, count), int)  # ahead: committed tokens after the prompt
        self.ends = np.full(count, 10**9)  # step of the last token
        self.histograms = [[0] * (option.config.num_steps + 1) for option in self.options]
        self.gaps: list[float] = []
        self.observed: list[tuple[list[int], int, list[int], float]] = []  # as a policy observes rounds

    def deliver(self, number: int, step: int, time: float) -> None:
        self.lasts[number], self.last_steps[number] = time, step
        if 1 + self.ahead[number] >= self.work.output_tokens[number]:
            self.ends[number] = step

    def prefill(self, chunks: list[tuple[int, int]], step: int, time: float) -> list[int]:
        """Read whole prompts: first without the cached columns, after a preemption all columns so far."""
        numbers = [self.numbers[end // BLOCK] for _, end in chunks]
        for number, (start, end) in zip(numbers, chunks, strict=True):
            is_first = np.isnan(self.firsts[number])
            assert start == (self.work.cached_columns[number] if is_first else 0)
            assert end == self.work.prompt_tokens[number] + self.ahead[number]
            assert self.ends[number] == 10**9  # no request goes on after its end
            if is_first:
                self.firsts[number], self.first_steps[number] = time, step
                self.deliver(number, step, time)
            else:
                self.resumed[number] += 1
        return numbers

    def round(self, contexts: list[int], choice: Choice, step: int, time: float, seconds: float) -> list[int]:
        """Accept the drafts of a round; it adds nothing to requests that ended in the round before."""
        numbers = [self.numbers[context // BLOCK] for context in contexts]
        num_steps = self.options[choice.setting].config.num_steps
        limits = np.full(len(numbers), num_steps) if choice.steps is None else choice.steps
        positions = self.ahead[numbers].tolist()
        assert contexts == (self.work.prompt_tokens[numbers] + positions).tolist()
        accepted = [accepted_drafts(*drafted) for drafted in zip(numbers, positions, limits.tolist(), strict=True)]
        for number, position, drafts in zip(numbers, positions, accepted, strict=True):
            self.ahead[number] += drafts + 1
            if 1 + position >= self.work.output_tokens[number]:
                self.surplus[number] += 1
                continue
            self.gaps.append(time - self.lasts[number])
            self.deliver(number, step, time)
            self.rounds[number] += 1
            self.drafts[number] += drafts
            self.histograms[choice.setting][drafts] += 1
        self.observed.append((numbers, choice.setting, accepted, seconds))
        return numbers


def ready_times(work: SimulatedWorkload, sent: np.ndarray) -> np.ndarray:
    """Seconds at which requests reach the scheduler: the front end takes them in one by one."""
    free, ready = 0.0, []
    for seconds in sent.tolist():
        free = max(seconds, free) + work.intake
        ready.append(free + work.latency)
    return np.array(ready)


def tally_of(server: dict, run: SimulatedRun, cost: CountedCost, policy: Alternating | None) -> Tally:
    """Follow a run step by step, and check what its log says of time, places and pages."""
    work, options, serving = server["workload"], server["options"], server["serving"]
    tally, calls = Tally(work, options), iter(cost.calls)
    choices = iter(policy.choices if policy else [])
    ready = ready_times(work, run.arrivals)
    lag = int(serving.schedule == "overlap")  # a step's results are read in the next
    if serving.chunk_tokens is not None:
        tally.firsts, tally.lasts = run.firsts.copy(), run.firsts.copy()
        tally.first_steps, tally.last_steps = run.first_steps.copy(), run.first_steps.copy()
        tally.ends = np.where(work.output_tokens == 1, run.first_steps, tally.ends)
    time = planned = 0.0
    before = tally.ahead.copy()
    for index, step in enumerate(run.log):
        lengths = work.prompt_tokens + (before if lag else tally.ahead)  # that the host knows
        before = tally.ahead.copy()
        is_known_to_end = tally.ends < index - lag
        if not ((ready <= planned) & ~is_known_to_end).any():
            time = planned = max(time, float(ready[ready > planned].min()))
        assert step.start == time
        chunks, contexts, numbers = [], [], []
        for _ in range(1 + (server["prefill"] == "beside" and step.chunks > 0 and step.running > 0)):
            new_chunks, new_contexts, config, seconds = next(calls)
            time += seconds
            chunks, contexts = chunks + new_chunks, contexts + new_contexts
            if new_contexts:
                choice = next(choices) if policy else Choice(0)
                assert config is options[choice.setting].config
                assert step.option == choice.setting
                numbers += tally.round(new_contexts, choice, index, time, seconds)
            if new_chunks and serving.chunk_tokens is None:
                numbers += tally.prefill(new_chunks, index, time)
        new_tokens = sum(end - start for start, end in chunks)
        assert (step.running, step.chunks, step.prompt_tokens) == (len(contexts), len(chunks), new_tokens)
        assert step.start + step.seconds == time
        if serving.chunk_tokens is None and (server["prefill"] != "first" or not chunks):
            present = sorted({*numbers})
            assert step.pages == sum(pages(int(lengths[number]), options) for number in present)
            assert step.waiting == (ready <= planned).sum() - is_known_to_end.sum() - len(present)
            assert len(present) <= serving.max_running
        assert step.pages * options[0].config.page_size <= serving.num_slots
        assert new_tokens <= (serving.chunk_tokens or new_tokens)
        planned = step.start if lag else time
    assert next(calls, None) is None
    return tally


FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@settings(FEW, max_examples=600)
@given(st.integers(0, 2**32))
def test_every_draft_column_page_and_second_is_counted_once(seed):
    server = random_server(np.random.default_rng(seed))
    work, serving = server["workload"], server["serving"]
    policy = Alternating(server["options"]) if len(server["options"]) > 1 else None
    cost = CountedCost()
    run = simulate(cost, **server, policy=policy, log=True)
    tally = tally_of(server, run, cost, policy)
    for name in ("firsts", "lasts", "first_steps", "last_steps", "rounds", "drafts"):
        assert getattr(run, name).tolist() == getattr(tally, name).tolist(), name
    assert [histogram.tolist() for histogram in run.accepted_drafts] == tally.histograms
    lag = int(serving.schedule == "overlap")
    # In mode `beside` a prompt is followed by a round in its own step, before the host knows that its token was all.
    assert (tally.surplus <= lag + lag * (work.output_tokens == 1) * (server["prefill"] == "beside")).all()
    if serving.chunk_tokens is None:  # a request may end in the round before its preemption is noticed
        assert set(run.preemptions - tally.resumed) <= {0, lag}
    elif not run.preemptions.any():
        assert sum(step.prompt_tokens for step in run.log) == (work.prompt_tokens - work.cached_columns).sum()
    ends = np.sort(run.lasts)
    free = np.zeros(len(work)) if work.concurrency is None else np.append(np.zeros(work.concurrency), ends)[: len(work)]
    assert run.arrivals.tolist() == np.maximum(work.arrivals_s, free).tolist()
    assert run.num_steps == len(run.log)
    if policy:
        assert policy.observed == tally.observed[: len(policy.observed)]
        assert len(tally.observed) - len(policy.observed) <= lag
    assert run.metrics() == pytest.approx(metrics_of(tally, run.arrivals), rel=0.0015, nan_ok=True)  # a bin of gaps


def metrics_of(tally: Tally, arrivals: np.ndarray) -> dict[str, float]:
    """Figures of a run as vLLM's benchmark defines them, from single deliveries."""
    work, outputs = tally.work, tally.work.output_tokens
    duration = max(tally.lasts) - min(arrivals)
    tokens = np.array([outputs.sum(), len(work), outputs.sum() + work.prompt_tokens.sum()])
    metrics = dict(zip(THROUGHPUTS, tokens / duration, strict=True))
    decoding = (tally.lasts - tally.firsts)[outputs > 1] / (outputs[outputs > 1] - 1)
    for name, values in zip(
        LATENCIES, (tally.firsts - arrivals, decoding, tally.gaps, tally.lasts - arrivals), strict=True
    ):
        values = 1e3 * np.array(values) if len(values) else np.array([np.nan])
        for statistic, value in zip(STATISTICS, (np.mean(values), *np.quantile(values, (0.5, 0.99))), strict=True):
            metrics[f"{statistic} {name} (ms)"] = value
    drafting = [histogram for histogram in tally.histograms if len(histogram) > 1]
    rounds = sum(map(sum, drafting))
    accepted = sum(drafts * count for histogram in drafting for drafts, count in enumerate(histogram))
    proposed = sum((len(histogram) - 1) * sum(histogram) for histogram in drafting)
    rates = (1 + accepted / max(rounds, 1), 100 * accepted / proposed if proposed else np.nan)
    return metrics | dict(zip(SPECULATION, rates, strict=True))


class ForgetfulCost(CostModel):
    """A cost model of whose rounds the simulated server remembers nothing."""


def random_cost(rng: np.random.Generator, schedule: str) -> CostModel:
    target = model(str(rng.choice(["llama-3-8b", "gpt-oss-20b", "glm-4.7-flash"])))  # windows, experts
    host = Efficiency(host=3e-4, host_request=2e-6, host_drafts=1e-4, filters=1e-5)
    buckets = (None, (), (1, 2, 4, 8))[rng.integers(0, 3)]
    head = drafter(str(rng.choice(["eagle3", "mtp"])), target) if rng.integers(0, 3) else None
    return CostModel(GPU, target, head, (host, Efficiency())[rng.integers(0, 2)], schedule=schedule, buckets=buckets)


def random_acceptance(rng: np.random.Generator, steps: int) -> DraftAcceptance:
    recorded = tuple(np.arange(start, start + 5) % (steps + 1) for start in range(3))
    choices = [
        iid(0.7, steps),
        iid(0.5, steps + 1),
        steady(1 + steps / 2, steps),
        Mixture((iid(0.9, steps), iid(0.2, steps)), (1.0, 2.0)),
        RecordedAcceptance(recorded, steps),
        RecordedAcceptance(recorded, steps, "position"),
    ]
    return choices[rng.integers(0, len(choices))]


def contents(run: SimulatedRun) -> list:
    """All values of a run but its log, bit for bit."""
    values = [getattr(run, field.name) for field in fields(run) if field.name not in ("gaps", "accepted_drafts", "log")]
    return [np.asarray(value).tolist() for value in (*values, run.gaps._counts, *run.accepted_drafts)]


@FEW
@given(st.integers(0, 2**32))
def test_remembered_rounds_and_drawn_drafts_change_nothing(seed):
    """A run that remembers a cost model's rounds, and draws all drafts before, is one that asks in every round."""
    rng = np.random.default_rng(seed)
    server = random_server(rng)
    config = server.pop("options")[-1].config
    acceptance = random_acceptance(rng, config.num_steps)
    cost = random_cost(rng, server["serving"].schedule)
    if rng.integers(0, 2):  # no request is preempted: the rounds of all are known from the beginning
        server["serving"] = replace(server["serving"], num_slots=10**6)
    forgetful = ForgetfulCost(*(getattr(cost, field.name) for field in fields(cost) if field.init))
    asked = Callback(acceptance.accepted, acceptance.num_steps)
    drawn = simulate(cost, Option(config, acceptance), **server, seed=seed % 9)
    with patch("specsim.simulator.server.MOST_GAPS", 3):  # gaps that are counted often
        fresh = simulate(forgetful, Option(config, asked), **server, seed=seed % 9, log=True)
    assert contents(drawn) == contents(fresh)
    assert np.allclose(drawn.gaps._sums, fresh.gaps._sums, rtol=1e-12, atol=0)


FREE = Efficiency(1, 1, 1, mxfp4_experts=1, gap=0, launch=0, host=0, host_request=0, collective=0)
NO_READING = replace(GPU, bandwidth=1e30)
LAYERS = {"eagle": 1, "eagle3": 1, "mtp": 1, "p-eagle": 4, "dflash": 5, "dspark": 5}  # of published heads
CONFIGS = (SpecConfig.plain(), SpecConfig(1, 3, 4), SpecConfig(4, 3, 8), SpecConfig(1, 1, 2))
CHUNKS = np.array([64, 32])


def seconds(cost: CostModel, config: SpecConfig, size: int, chunks: int) -> float:
    return cost.mixed(CHUNKS[:chunks], np.array([0, 10])[:chunks], np.full(size, 500), config)


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("size", "chunks"), [(3, 0), (3, 2), (0, 2), (1, 1)])
def test_every_row_and_kernel_of_a_step_is_counted_once(kind, config, size, chunks):
    """Rows of target and drafter, from the time that more weights take, and what each further parameter counts."""
    steps, topk, tokens = config.num_steps, config.topk, int(CHUNKS[:chunks].sum())
    rounds = 0 if config.is_plain else size  # that draft
    is_block = kind in ("dflash", "dspark")
    forwards = {"p-eagle": 0, "dflash": 1, "dspark": 1}.get(kind, steps - 1) if rounds else 0
    draft_rows = {"dflash": steps + 1, "dspark": steps}.get(kind, topk)
    extend_rows = rounds * (2 * steps if kind == "p-eagle" else steps + 1) + tokens
    draft_head, extend_head = (steps, 0) if is_block else (topk, steps if kind == "p-eagle" else 1)
    head = drafter(kind, LLAMA)

    def rows(target: Model, drafting: Model) -> float:
        costs = [
            CostModel(NO_READING, *pair, FREE) for pair in ((target, replace(head, model=drafting)), (LLAMA, head))
        ]
        wide, narrow = (seconds(cost, config, size, chunks) for cost in costs)
        return (wide - narrow) * GPU.flops("bfloat16") / 2e9

    def wider(base: Model, part: str) -> Model:
        if part != "layers":
            return replace(base, **{part: getattr(base, part) + 10**9})
        first, *others = base.layers
        single = replace(first, count=1, dense_weights=first.dense_weights + 10**9)
        return replace(base, layers=(single, replace(first, count=first.count - 1), *others))

    drafted = rounds * forwards
    counts = {"layers": drafted * draft_rows + (0 if is_block else extend_rows), "entry_weights": extend_rows}
    counts["head_weights"] = drafted * draft_head + (0 if is_block else rounds * extend_head + chunks)
    for part, count in counts.items():
        assert rows(LLAMA, wider(head.model, part)) == pytest.approx(count, rel=1e-6), part
    nodes = size * config.num_draft_tokens
    assert rows(wider(LLAMA, "layers"), head.model) == pytest.approx(nodes + tokens, rel=1e-6)
    assert rows(wider(LLAMA, "head_weights"), head.model) == pytest.approx(nodes + chunks, rel=1e-6)

    kernels = 4 + 9 * LAYERS[kind]  # a dense layer has nine; fc and two a layer write a block drafter's context
    gaps = 4 + 9 * 32 + forwards * kernels
    gaps += (2 + 2 * LAYERS[kind] if is_block else kernels) * bool(rounds or chunks)
    gaps += 3 * steps * bool(rounds) * (kind == "dspark")
    parameters = {"gap": gaps, "filters": 1, "host": 1, "host_request": size + chunks, "host_drafts": bool(rounds)}
    parameters["draft_step"] = bool(rounds) * (1 if is_block or kind == "p-eagle" else steps)
    for name, count in parameters.items():
        costs = [
            CostModel(GPU, LLAMA, head, efficiency, schedule="sync")
            for efficiency in (replace(FREE, **{name: 1.0}), FREE)
        ]
        slow, quick = (seconds(cost, config, size, chunks) for cost in costs)
        assert slow - quick == pytest.approx(int(count)), name
