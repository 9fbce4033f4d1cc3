"""Settings, rounds and serving of the tests of every drafter with weights."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.core.phases import Batch, DraftInput, PrefillInput, VerifyInput
from specsim.core.pool import KVPool
from specsim.correctness.differential import Cell
from specsim.correctness.differential.oracle import compare_with_oracle
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import generate, load_engine
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler

PROMPTS = ((5, 17, 3, 40, 8, 9, 30), (1, 2, 3, 4), (30,))
LONG = tuple(range(1, 12))
PREFIX = tuple(range(3, 13))
PREFIXED = [(*PREFIX, 20), (*PREFIX, 21, 22), (*PREFIX, 20, 5, 6), (9, 8)]
EXACT = EngineOptions(dtype=torch.float64)
FAST = EngineOptions(impl="fast")
both = pytest.mark.parametrize("options", [EXACT, FAST], ids=["reference", "fast"])

CHAIN = SpecConfig(1, 3, page_size=4)
TREE = SpecConfig(4, 3, 8, page_size=4)
SETTINGS = {
    "chain": CHAIN,
    "chain, round": replace(CHAIN, page_size=1, release="round", extend="ragged"),
    "tree": TREE,
    "tree, round": replace(TREE, release="round", extend="ragged", draft_kv="ancestor"),
    "tree, large pages": replace(TREE, page_size=16),
    "near the limit": replace(TREE, max_len=14),
}
SAMPLED = {
    "rejection": replace(CHAIN, verifier="rejection"),
    "block": replace(CHAIN, verifier="block", page_size=1),
    "gumbel": replace(CHAIN, verifier="gumbel", release="round"),
    "multi_round": SpecConfig(2, 3, page_size=4, verifier="multi_round"),
    "recursive": SpecConfig(2, 3, page_size=4, verifier="recursive"),
    "target_only": TREE,
}
SERVED = {
    "prefix cache": dict(prefix_cache=True, max_running=2),
    "chunks": dict(chunk_tokens=3),
    "preemption": dict(num_slots=44, prefix_cache=True),
    "overlap": dict(prefix_cache=True, schedule="overlap"),  # needs release finish
}
every_serving = pytest.mark.parametrize(
    ("serving", "release"),
    [(name, release) for name in SERVED for release in ("finish", "round") if (name, release) != ("overlap", "round")],
)


def settings_and_families(*settings: dict[str, SpecConfig]) -> pytest.MarkDecorator:
    """Parametrise by the name of a setting, with the families in turn; None: of every drafter."""
    names = [name for group in settings or (SETTINGS, SAMPLED) for name in group]
    families = ["llama", "qwen3", "mistral"] * len(names)
    return pytest.mark.parametrize(("name", "family"), [*zip(names, families, strict=False)])


def pair_of(kind: str, family: str = "llama", **changes) -> Pair:
    """Make a synthetic pair, in which Mistral's window is shorter than the texts."""
    return synthetic_pair(kind, family, **{"window": {"mistral": 7}.get(family), **changes})


def assert_equal_to_the_oracle(pair: Pair, config: SpecConfig, temperature: float = 0.0) -> None:
    seeds = range(len(PROMPTS))
    sampling = tuple(SamplingParams(temperature=temperature, seed=seed, max_new_tokens=10) for seed in seeds)
    assert compare_with_oracle(Cell("rounds", pair.name, PROMPTS, sampling, config), pair) == []


class Prefilled(NamedTuple):
    """Requests whose prompts are in the pools of an engine."""

    engine: Engine
    batch: Batch
    draft_input: DraftInput
    pools: KVPool


def prefilled(
    pair: Pair, config: SpecConfig, options: EngineOptions, prompts=PROMPTS, params=None, grammars=None, next_token=-1
) -> Prefilled:
    """Prefill prompts, by default greedily and without a known next token, in pools of NaN."""
    engine = load_engine(pair, config, options, grammars=grammars)
    pools = engine.make_pools(len(prompts), 2048)
    for buffer in filter(None, (pools.target, pools.draft)):
        buffer.keys.fill_(torch.nan)
        buffer.values.fill_(torch.nan)
    rows = [pools.open() for _ in prompts]
    lengths = [len(prompt) for prompt in prompts]
    for row, length in zip(rows, lengths, strict=True):
        pools.reserve(row, length)
    params = params or [SamplingParams()] * len(prompts)
    batch = Batch.of(range(len(prompts)), rows, lengths, params, pair.target.config.vocab_size).to(engine.device)
    prefill = PrefillInput.of_prompts(prompts)
    prefill = replace(prefill, next_tokens=torch.full((len(prompts),), next_token)).to(engine.device)
    return Prefilled(engine, batch, engine.prefill(batch, prefill, pools).draft_input, pools)


class Drafted(NamedTuple):
    """A request after the draft phase of a round."""

    tokens: list[int]  # committed ones and the root
    tree: VerifyInput
    pools: KVPool
    keys: torch.Tensor | None  # draft keys of these tokens before the phase, where they own columns; None without KV


def draft_phases(
    pair: Pair, config: SpecConfig, options: EngineOptions = EXACT, chunks=(7,), prompt=PROMPTS[0]
) -> Iterator[Drafted]:
    """Run five rounds of a prompt that is prefilled in chunks with these ends.

    No draft-extend may write the target's KV.
    """
    engine = load_engine(pair, config, options)
    pools = engine.make_pools(1, 160)
    row = pools.open()
    pools.reserve(row, len(prompt) + 1)
    start = 0
    for end in chunks:
        next_token = torch.tensor([prompt[end] if end < len(prompt) else -1])
        part = PrefillInput.of_prompts([prompt[start:end]])
        part = replace(part, start_lens=torch.tensor([start]), next_tokens=next_token).to(engine.device)
        batch = Batch.of([0], [row], [end], [SamplingParams()], pair.target.config.vocab_size)
        batch = replace(batch, prompt_lens=torch.tensor([len(prompt)])).to(engine.device)
        draft_input = engine.prefill(batch, part, pools).draft_input
        start = end
    for _ in range(5):
        length = int(batch.seq_lens)
        tokens = pools.token_ids[row, : length + 1].tolist()
        columns = torch.arange(min(length + 1, pools.owned_columns(row)), device=engine.device)
        keys = pools.draft.keys[:, pools.slots(row, columns)].cpu() if pools.draft else None
        tree = engine.draft(batch, draft_input, pools)
        yield Drafted(tokens, tree, pools, keys)
        output = engine.verify(batch, tree, pools)
        before = [kv.clone().nan_to_num() for kv in (pools.target.keys, pools.target.values)]
        draft_input = engine.draft_extend(batch, output.draft_extend_input, pools)
        assert torch.equal(pools.target.keys.nan_to_num(), before[0])
        assert torch.equal(pools.target.values.nan_to_num(), before[1])
        batch = batch.after(output.verdict.num_accepted_tokens)


# Serving.


def request_of(pair: Pair, request_id: int, prompt, new_tokens: int = 12, **schedule) -> Request:
    sampling = SamplingParams(max_new_tokens=new_tokens)
    return make_request(pair.target.config, None, request_id, prompt, sampling, **schedule)


def scheduler_of(
    pair: Pair, requests: list[Request], options: EngineOptions = EXACT, config: SpecConfig = CHAIN, **serving
) -> Scheduler:
    """Make a scheduler with audits, to which requests are submitted."""
    serving = ServingConfig(**{"num_slots": 640} | serving)
    scheduler = Scheduler(load_engine(pair, config, options), serving, audits=True)
    for request in requests:
        scheduler.submit(request)
    return scheduler


def served(pair: Pair, config: SpecConfig, **serving) -> tuple[Scheduler, list[Request]]:
    """Serve PREFIXED, which arrive one after another, on the reference."""
    requests = [request_of(pair, index, prompt, 13, arrival=2 * index) for index, prompt in enumerate(PREFIXED)]
    scheduler = scheduler_of(pair, requests, EXACT, config, **serving)
    with torch.inference_mode():
        scheduler.run()
    scheduler.close()
    assert scheduler.pools.audit()["free"] == scheduler.pools.num_slots
    return scheduler, requests


def assert_served_rounds_are_solo(pair: Pair, config: SpecConfig, **serving) -> None:
    _, requests = served(pair, config, **serving)
    for request, prompt in zip(requests, PREFIXED, strict=True):
        (solo,) = generate(pair, [prompt], config, SamplingParams(max_new_tokens=13), engine=EXACT).outputs
        assert tuple(request.token_ids) == solo.token_ids
        assert tuple(request.accepted) == solo.num_accepted_tokens_per_round


def kv_after(scheduler: Scheduler, request: Request, rounds: int) -> tuple[int, torch.Tensor]:
    """Step until a request has had some rounds: its committed columns and their draft KV."""
    while len(request.accepted) < rounds:
        assert request.finish_reason is None
        scheduler.step()
    columns = scheduler.reservations.committed(request)
    slots = scheduler.pools.slots(request.row, torch.arange(columns))
    draft = scheduler.pools.draft
    return columns, torch.stack([draft.keys[:, slots], draft.values[:, slots]]).double()


def assert_chunks_leave_the_draft_kv(pair: Pair, options: EngineOptions, **serving) -> None:
    """Compare with a prefill of the whole prompt."""
    kv = []
    for setting in (serving, {}):
        request = request_of(pair, 0, LONG)
        kv.append(kv_after(scheduler_of(pair, [request], options, **setting), request, 1))
    (columns, actual), (expected_columns, expected) = kv
    assert columns == expected_columns
    assert_kv_close(actual, expected, options)


def assert_kv_close(actual: torch.Tensor, expected: torch.Tensor, options: EngineOptions) -> None:
    budget = 1e-9 if options.impl == "reference" else 1e-4
    torch.testing.assert_close(actual, expected, rtol=budget, atol=budget)
