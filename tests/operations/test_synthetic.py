import json
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.phases import Batch, Verdict
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.synthetic_acceptance import ONE, SCHEDULES, SyntheticAcceptance
from specsim.fast import synthetic as fast
from specsim.fast.verify import verify as fast_verify
from specsim.models.synthetic_pair import synthetic_pair
from specsim.reference.acceptance import Tree
from specsim.reference.synthetic import accepting, scheduled_drafts, scheduled_path
from specsim.reference.verify import verify as reference_verify
from specsim.serving.generation import generate, load_engine
from specsim.serving.requests import make_request
from specsim.serving.serve import serve
from specsim.serving.trace import Trace

from .trees import tree_batch

EXACT = EngineOptions(dtype=torch.float64)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATES = (0.8, 0.6, 0.35)
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=4)
TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=4)
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
WARM = replace(GREEDY, temperature=1.0, top_p=0.9, seed=5)
PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3]


@st.composite
def unconditional(draw, most: int = 6):
    """Draw rates that never grow, among them 0, 1 and equal ones."""
    rate = st.one_of(st.sampled_from([0.0, 0.25, 1.0]), st.floats(0, 1))
    return tuple(sorted(draw(st.lists(rate, min_size=1, max_size=most)), reverse=True))


def batch_of(ids, lengths, num_rounds, params=GREEDY) -> Batch:
    """Make requests of these lengths after a number of rounds, in rows 0, 1, ... of a pool."""
    batch = Batch.of(list(ids), range(len(ids)), [1] * len(ids), [params] * len(ids), 8, num_rounds)
    return replace(batch, seq_lens=torch.tensor(list(lengths), dtype=torch.int64))


def drafts_of(acceptance: SyntheticAcceptance, request_ids, num_rounds: int, prompt_len: int = 7) -> torch.Tensor:
    """Count the drafts that the first rounds of each request accept, i64 [requests, rounds]."""
    counts = torch.empty(len(request_ids), 0, dtype=torch.int64)
    for index in range(num_rounds):
        batch = batch_of(request_ids, prompt_len + (counts + 1).sum(1), [index] * len(request_ids))
        counts = torch.cat([counts, torch.tensor(scheduled_drafts(batch, acceptance))[:, None]], dim=1)
    return counts


def drafts(acceptance: SyntheticAcceptance, request_id: int, num_rounds: int, prompt_len: int = 7) -> list[int]:
    return drafts_of(acceptance, [request_id], num_rounds, prompt_len)[0].tolist()


# The value


@pytest.mark.parametrize(
    "rates", [(), (0.5, 0.6), (1.1,), (-0.1,), (math.nan,), ("0.5",), (True,), 0.5, None, (0.5, None)]
)
def test_rates_are_checked(rates):
    with pytest.raises(InputError, check=lambda error: error.name == "rates"):
        SyntheticAcceptance(rates)


def test_schedule_and_seed_are_checked():
    with pytest.raises(InputError, check=lambda error: error.name == "schedule"):
        SyntheticAcceptance(RATES, "random")
    for seed in (-1, 2**64, 1.0):
        with pytest.raises(InputError, check=lambda error: error.name == "seed"):
            SyntheticAcceptance(RATES, seed=seed)


@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_there_is_a_rate_for_each_step(impl):
    for config in (CHAIN, SpecConfig.plain()):
        with pytest.raises(InputError, check=lambda error: error.name == "rates"):
            load_engine(synthetic_pair(), config, EngineOptions(impl), acceptance=SyntheticAcceptance((0.5, 0.5)))


@pytest.mark.parametrize(
    ("length", "num_steps", "rates"),
    [(2.6, 3, (1.0, 0.6, 0.0)), (1, 3, (0.0, 0.0, 0.0)), (4, 3, (1.0, 1.0, 1.0)), (3.5, 4, (1.0, 1.0, 0.5, 0.0))],
)
def test_rates_of_a_length_vary_least(length, num_steps, rates):
    acceptance = SyntheticAcceptance.of_length(length, num_steps, schedule="independent")
    assert acceptance.rates == pytest.approx(rates)
    assert acceptance.schedule == "independent"


@pytest.mark.parametrize("length", [0.9, 4.1, math.nan, "2", True])
def test_length_is_one_that_rounds_can_have(length):
    with pytest.raises(InputError, check=lambda error: error.name == "accept_length"):
        SyntheticAcceptance.of_length(length, 3)


# The distribution


@given(unconditional(), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_minimum_variance_keeps_every_position_close(rates, request_id, seed):
    counts = [0] * len(rates)
    for rounds, accepted in enumerate(drafts(SyntheticAcceptance(rates, seed=seed), request_id, 60), start=1):
        counts = [count + (position < accepted) for position, count in enumerate(counts)]
        for position, (count, rate) in enumerate(zip(counts, rates, strict=True)):
            assert abs(count - rounds * rate) < position + 1


def test_minimum_variance_by_hand():
    """Three of four rounds accept a draft, and two of three of these a second one."""
    shares, phases = (ONE * 3 // 4, round(ONE * 2 / 3)), (ONE // 2, 0)
    assert [accepting(rounds, shares, phases) for rounds in range(6)] == [
        [0, 0],
        [1, 0],
        [2, 1],
        [2, 1],
        [3, 2],
        [4, 2],
    ]


def test_minimum_variance_has_the_rates_in_the_mean():
    """1500 requests have independent phases.

    Means are within 4.5 standard deviations, 1 in 10^5 for each rate.
    """
    accepted = drafts_of(SyntheticAcceptance(RATES), range(1500), 5)
    for position, rate in enumerate(RATES):
        shares = (accepted > position).double().mean(0)
        assert ((shares - rate).abs() < 4.5 * math.sqrt(rate * (1 - rate) / 1500)).all()


def test_independent_has_the_rates_and_no_memory():
    """60 rounds of 100 requests, and those after a fully accepted round, are within 4.5 standard deviations."""
    accepted = drafts_of(SyntheticAcceptance(RATES, "independent"), range(100), 60)
    for position, rate in enumerate(RATES):
        hits = (accepted > position).double()
        assert abs(hits.mean() - rate) < 4.5 * math.sqrt(rate * (1 - rate) / 6000)
        after = hits[:, 1:][accepted[:, :-1] == 3]
        assert abs(after.mean() - rate) < 4.5 * math.sqrt(rate * (1 - rate) / len(after))


def test_minimum_variance_varies_less_than_independent():
    counts = {schedule: drafts_of(SyntheticAcceptance(RATES, schedule), range(100), 40) for schedule in SCHEDULES}
    variances = {schedule: float(accepted.sum(1).double().var()) for schedule, accepted in counts.items()}
    assert variances["minimum-variance"] < 2 < 20 < variances["independent"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_seed_and_request_name_the_uniforms(schedule):
    def found(request_id, seed):
        return drafts(SyntheticAcceptance(RATES, schedule, seed), request_id, 30)

    assert found(1, 0) == found(1, 0)
    assert len({tuple(found(*names)) for names in ((1, 0), (2, 0), (1, 1))}) == 3
    assert found(1, 2**63) != found(1, 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rates", "accepted"), [((1.0, 1.0, 0.0), 2), ((0.0, 0.0), 0), ((1.0,) * 4, 4)])
def test_rates_of_0_and_1_are_kept_in_every_round(schedule, rates, accepted):
    assert set(drafts(SyntheticAcceptance(rates, schedule), 11, 40)) == {accepted}


# The path


def test_path_is_the_first_of_its_depth_or_of_the_deepest():
    """Nodes 1 and 2 are below the root, 3 below 2, 4 below 1, 5 below 3."""
    parents = [-1, 0, 0, 2, 1, 3]
    grown = Tree([0] * 6, parents, [-1] * 6, [-1] * 6, 99)
    assert [scheduled_path(grown, count) for count in range(6)] == [[0], [0, 1], [0, 2, 3], *[[0, 2, 3, 5]] * 3]
    assert scheduled_path(replace(grown, depth_limit=1), 3) == [0, 1]
    assert scheduled_path(replace(grown, depth_limit=-2), 3) == [0]


def chain_like(rng: random.Random, num_nodes: int, num_steps: int) -> list[int]:
    """Draw the parents of a tree of at most that depth."""
    parents, depths = [-1], [0]
    for _ in range(1, num_nodes):
        parent = rng.choice([node for node, depth in enumerate(depths) if depth < num_steps])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def pool_of(rows: int, device: str = "cpu") -> KVPool:
    pools = KVPool(KVBuffer(KVLayout(1, 1, 2), 8, torch.float32, device), None, 1, rows, 80)
    pools.token_ids[:] = 3
    return pools


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_both_implementations_give_the_same_verdict(schedule, temperature, num_steps, program_order):
    """Trees have any form and lengths up to the limit, and one request is padded."""
    rng = random.Random(num_steps)
    for num_nodes in (num_steps + 1, 7):
        config = SpecConfig(topk=8, num_steps=num_steps, num_draft_tokens=num_nodes, page_size=1, max_len=64)
        lengths = [5, 17, 40, 59, 60, 62, 63, 0]
        grown = tree_batch([chain_like(rng, num_nodes, num_steps) for _ in lengths], lengths)
        for name in ("parents", "retrieve_next_token", "retrieve_next_sibling"):
            getattr(grown, name)[7] = -1
        rates = sorted((rng.random() for _ in range(num_steps)), reverse=True)
        acceptance = SyntheticAcceptance(tuple(rates), schedule, seed=rng.randrange(2**64))
        params = replace(GREEDY, temperature=temperature, seed=3)
        batch = batch_of(range(8), lengths, [*range(7), 0], params)
        padded = replace(batch, req_pool_indices=torch.tensor([*range(7), -1]))
        logits = torch.randint(-4, 4, (8 * num_nodes, 8)).float()
        real = batch.filter(torch.arange(7))
        names = ("draft_tokens", "parents", "retrieve_next_token", "retrieve_next_sibling")
        real_input = replace(grown, **{name: getattr(grown, name)[:7] for name in names})
        real_logits = logits[: 7 * num_nodes]
        expected = reference_verify(real, real_input, real_logits, config, pool_of(8), acceptance=acceptance)
        pools = pool_of(8, DEVICE)
        on_device = fast.SyntheticSchedule.of(acceptance, DEVICE)
        found = fast_verify(
            padded.to(DEVICE), grown.to(DEVICE), logits.to(DEVICE), config, pools, acceptance=on_device
        ).to("cpu")
        assert torch.equal(found.predict[: 7 * num_nodes], expected.predict)
        for name in ("accept_index", "num_accepted_drafts", "num_accepted_tokens"):
            assert torch.equal(getattr(found, name)[:7], getattr(expected, name)), name
        torch.testing.assert_close(found.logprobs[:7], expected.logprobs, atol=1e-5, rtol=0)
        assert found.accept_index[7].tolist() == [-1] * (num_steps + 1)
        assert found.predict[7 * num_nodes :].tolist() == [-1] * num_nodes
        assert found.num_accepted_drafts[7] == 0


@given(unconditional(8), st.sampled_from(SCHEDULES), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=25)
def test_kernel_decides_as_the_reference_in_any_round(rates, schedule, seed, data):
    """In chains only the schedule decides.

    Many rounds are run at once, up to the two millionth.
    """
    acceptance, num_steps = SyntheticAcceptance(rates, schedule, seed), len(rates)
    lengths, num_rounds = ([data.draw(st.integers(1, 1 << 21)) for _ in range(6)] for _ in range(2))
    config = SpecConfig(topk=1, num_steps=num_steps, num_draft_tokens=num_steps + 1, page_size=1, max_len=1 << 22)
    batch = batch_of(range(6), lengths, num_rounds)
    grown = tree_batch([[-1, *range(num_steps)]] * 6, lengths).to(DEVICE)
    verdict, rejected = empty_verdict(batch, config), torch.empty(6, dtype=torch.int64, device=DEVICE)
    on_device = fast.SyntheticSchedule.of(acceptance, DEVICE)
    fast.follow(batch.to(DEVICE), grown, on_device, config, verdict, rejected)
    assert verdict.num_accepted_drafts.tolist() == scheduled_drafts(batch, acceptance)
    assert (rejected == -1).all()


def empty_verdict(batch: Batch, config: SpecConfig) -> Verdict:
    def unwritten(*size, dtype=torch.int32):
        return torch.empty(size, dtype=dtype, device=DEVICE)

    rows, width = batch.size * config.num_draft_tokens, (batch.size, config.num_steps + 1)
    counts = unwritten(batch.size), unwritten(batch.size)
    return Verdict(unwritten(rows), unwritten(*width), *counts, unwritten(*width, dtype=torch.float32))


# Engines


def rounds_of(generation) -> list[tuple[int, ...]]:
    return [output.num_accepted_tokens_per_round for output in generation.outputs]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chains_accept_the_scheduled_drafts(kind, schedule):
    acceptance = SyntheticAcceptance(RATES, schedule)
    for sampling in (GREEDY, WARM):
        generation = generate(synthetic_pair(kind), PROMPTS, CHAIN, sampling, acceptance=acceptance)
        for request_id, counts in enumerate(rounds_of(generation)):
            prompt_len = len(PROMPTS[request_id])
            assert [n - 1 for n in counts] == drafts(acceptance, request_id, len(counts), prompt_len)


def test_accepted_tokens_are_drafts_and_the_bonus_is_the_targets():
    """The tokens are those of plain decoding with no draft accepted, and differ with all accepted."""
    pair = synthetic_pair(noise=1.0)
    plain = generate(pair, PROMPTS, SpecConfig.plain(), GREEDY, engine=EXACT)
    none, every = (
        generate(pair, PROMPTS, CHAIN, GREEDY, acceptance=SyntheticAcceptance((rate,) * 3), engine=EXACT)
        for rate in (0.0, 1.0)
    )
    assert [output.token_ids for output in none.outputs] == [output.token_ids for output in plain.outputs]
    assert [output.token_ids for output in every.outputs] != [output.token_ids for output in plain.outputs]
    assert {count for counts in rounds_of(every) for count in counts} == {4}
    assert every.acceptance.accepted_by_position == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("serving", ["sync", "overlap"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_request_is_the_same_solo_batched_and_preempted(schedule, serving):
    pair, acceptance = synthetic_pair(), SyntheticAcceptance(RATES, schedule)
    engine = load_engine(pair, TREE, EXACT, acceptance=acceptance)
    requests = [
        make_request(pair.target.config, None, 7 + n, prompt, replace(WARM, max_new_tokens=40))
        for n, prompt in enumerate(PROMPTS)
    ]
    served = serve(engine, requests, ServingConfig(serving, num_slots=112, chunk_tokens=4))
    assert served.totals["num_preemptions"] > 0
    for request in served.requests:
        solo = dict(request_ids=[request.request_id], acceptance=acceptance, engine=EXACT)
        (alone,) = generate(pair, [request.prompt_ids], TREE, request.params, **solo).outputs
        assert tuple(request.token_ids) == alone.token_ids
        assert tuple(request.accepted) == alone.num_accepted_tokens_per_round


MODES = tuple(zip(("eager", "step", "phase", "round"), 2 * SCHEDULES, strict=True))
OTHER_MODES = tuple(zip(("eager", "step", "phase", "round"), 2 * SCHEDULES[::-1], strict=True))


@pytest.mark.parametrize(
    ("graph", "schedule"), [*MODES, *(pytest.param(*each, marks=pytest.mark.whole) for each in OTHER_MODES)]
)
def test_every_graph_mode_equals_the_reference(schedule, graph, device):
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4)
    run = synthetic_pair(), PROMPTS[:2], config, replace(WARM, max_new_tokens=8)
    options = EngineOptions(), EngineOptions("fast", device=device, graph=graph, bucket=3)
    acceptance = SyntheticAcceptance((0.9, 0.4), schedule)
    expected, fast_run = (generate(*run, acceptance=acceptance, engine=engine) for engine in options)
    assert rounds_of(fast_run) == rounds_of(expected)
    assert [output.token_ids for output in fast_run.outputs] == [output.token_ids for output in expected.outputs]


# Outputs


def test_every_output_names_synthetic_acceptance():
    from io import StringIO

    from rich.console import Console

    pair, acceptance = synthetic_pair(), SyntheticAcceptance(RATES, "independent", seed=2)
    told = {"synthetic": True, "rates": [0.8, 0.6, 0.35], "schedule": "independent", "seed": 2}
    label = "synthetic, independent at rates 0.8, 0.6, 0.35"
    generation = generate(pair, PROMPTS, CHAIN, GREEDY, acceptance=acceptance)
    assert json.loads(json.dumps(generation.to_json()))["acceptance"] == told
    assert label in generation._repr_html_()
    assert "synthetic accept length" in repr(generation)

    engine = load_engine(pair, CHAIN, acceptance=acceptance)
    served = serve(engine, [make_request(pair.target.config, None, 0, [1, 2], GREEDY)])
    value = json.loads(json.dumps(served.to_json()))
    assert value["acceptance"] == told
    assert value["trace"]["acceptance"] == label
    assert Trace.from_json(value["trace"]) == served.trace
    events = served.trace.events()
    assert set(events[events.event == "result"].acceptance) == {label}
    served.show(Console(file=(shown := StringIO()), width=100))
    assert f"{label}: not the target's, nor are the tokens" in " ".join(shown.getvalue().split())


def test_outputs_name_the_targets_acceptance():
    generation = generate(synthetic_pair(), PROMPTS, CHAIN, GREEDY)
    assert generation.to_json()["acceptance"] == {"synthetic": False}
    assert "synthetic" not in generation._repr_html_() + repr(generation)
