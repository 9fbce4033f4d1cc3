"""The running batch: lengths unknown to the host, chunks, calls without work, requests that leave."""

from dataclasses import fields, replace
from functools import cache

import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate
from specsim.core.engine_options import EngineOptions
from specsim.core.phases import Advance, DraftInput, State
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine
from specsim.serving.requests import Request
from specsim.serving.runner import Delivery, HostCopy, Runner

CONFIG = SpecConfig(topk=2, num_steps=2, num_draft_tokens=5, page_size=4, max_len=64)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=20, seed=5, ignore_eos=True)
PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3, [9, 8, 7, 6, 5, 4, 3, 2]]
NONE = torch.empty(0, dtype=torch.int64)


pytestmark = pytest.mark.usefixtures("inference")


def make_runner(config=CONFIG, kind="eagle3", lagging=False, impl="reference", **column):
    """Make (runner, engine, pools).

    Rows 0 and 1 stay unused, so that a row and an index always differ.
    """
    dtype = torch.float64 if impl == "reference" else torch.float32
    engine = load_engine(synthetic_pair(kind), config, EngineOptions(impl, dtype, **column))
    pools = engine.make_pools(8, 800)
    for buffer in (pools.target, pools.draft):
        if buffer is not None:
            buffer.keys.fill_(float("nan"))
            buffer.values.fill_(float("nan"))
    pools.open()
    pools.open()
    return Runner(engine, pools, lagging), engine, pools


def seat(pools, *numbers, prompts=PROMPTS) -> list[Request]:
    """Give requests a row and all columns they will need."""
    requests = [Request(each, list(prompts[each]), PARAMS, frozenset(), PARAMS.max_new_tokens) for each in numbers]
    for request in requests:
        request.row = pools.open()
        pools.reserve(request.row, 56)
    return requests


def prefill(runner, *requests) -> list[Delivery]:
    return runner.prefill(0, requests, [(0, request.prefill_len) for request in requests]).read()


@cache
def alone(number: int, config=CONFIG) -> tuple[int, ...]:
    """Compute the tokens of a request's solo run."""
    with torch.inference_mode(False):
        result = generate(
            synthetic_pair(),
            [PROMPTS[number]],
            config,
            PARAMS,
            request_ids=[number],
            engine=EngineOptions(dtype=torch.float64),
        )
    return result.outputs[0].token_ids


def named_tensors(value, name=""):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, State | Advance):
        for part in value._fields if isinstance(value, Advance) else [field.name for field in fields(value)]:
            yield from named_tensors(getattr(value, part), f"{name}.{part}".strip("."))


def assert_same(first, second, **tolerance):
    """Check that two states are equal, integers exactly."""
    pairs = zip(named_tensors(first), named_tensors(second), strict=True)
    for (name, mine), (other_name, theirs) in pairs:
        assert name == other_name
        torch.testing.assert_close(mine, theirs, **(tolerance or dict(rtol=0, atol=0)), msg=name)


# Lengths.


@pytest.mark.parametrize("config", [CONFIG, SpecConfig(1, 2, 3, page_size=1, max_len=64)], ids=["tree", "chain"])
def test_results_read_at_the_end_equal_solo_runs(config):
    """Requests leave from the front and the middle, and others join, before any result has been read."""
    runner, _, pools = make_runner(config, lagging=True)
    first, second, third, fourth = requests = seat(pools, 0, 1, 2, 3)
    launched = [runner.prefill(0, requests[:3], [(0, len(request.prompt_ids)) for request in requests[:3]])]
    launched += [runner.round(1), runner.round(2)]
    runner.drop([first])
    launched += [runner.round(3), runner.prefill(3, [fourth], [(0, 8)]), runner.round(4)]
    runner.drop([third])
    launched += [runner.round(5), runner.round(6)]
    assert all(request.prefill_len == len(request.prompt_ids) for request in requests)
    for each in launched:
        for delivery in each.read():
            delivery.request.take(delivery.token_ids, delivery.logprobs)
    for request, rounds in [(first, 2), (second, 6), (third, 4), (fourth, 3)]:
        assert len(request.token_ids) > rounds
        assert tuple(request.token_ids) == alone(request.request_id, config)[: len(request.token_ids)]


def test_a_host_that_does_not_lag_sets_the_lengths():
    """The host kept fewer tokens than the round gave, so the next round starts from those."""
    runner, engine, pools = make_runner()
    (request,) = seat(pools, 1)
    request.take(*prefill(runner, request)[0][1:3])
    (delivery,) = runner.round(1).read()
    request.take(delivery.token_ids, delivery.logprobs)
    seen = []
    whole = engine.advance
    engine.advance = lambda batch, *rest, **more: (seen.append(batch.seq_lens.tolist()), whole(batch, *rest, **more))[1]
    runner._batch = replace(runner._batch, seq_lens=torch.tensor([1]))
    (delivery,) = runner.round(2).read()
    assert seen == [[request.prefill_len]]
    request.take(delivery.token_ids, delivery.logprobs)
    assert tuple(request.token_ids) == alone(1)[: len(request.token_ids)]


# Results.


def test_results_belong_to_the_requests_of_their_launch():
    runner, _, pools = make_runner()
    requests = seat(pools, 0, 1, 2)
    prefill(runner, *requests)
    launched = runner.round(1)
    runner.drop(requests[:2])
    deliveries = launched.read()
    assert [delivery.request for delivery in deliveries] == requests
    for delivery in deliveries:
        tokens = alone(delivery.request.request_id)[1:]
        assert delivery.is_round
        assert 1 <= len(delivery.token_ids) <= CONFIG.num_steps + 1
        assert len(delivery.logprobs) == len(delivery.token_ids)
        assert tuple(delivery.token_ids) == tokens[: len(delivery.token_ids)]


def test_a_complete_prefill_delivers_the_first_token():
    """One prefill is incomplete, one resumes with its own last token (not the one to be sampled), one is new."""
    runner, _, pools = make_runner()
    part, resumed, new = seat(pools, 3, 0, 1)
    resumed.take([alone(0)[0], 33], [-1.0, -2.0])
    assert alone(0)[1] != 33
    launched = runner.prefill(4, [part, resumed, new], [(0, 5), (0, 6), (0, 11)])
    (delivery,) = launched.read()
    assert (launched.step, delivery.request, delivery.is_round) == (4, new, False)
    assert delivery.token_ids == [alone(1)[0]]
    assert len(delivery.logprobs) == 1
    assert runner.requests == [resumed, new]
    assert runner._draft_input.bonus_tokens.tolist() == [33, alone(1)[0]]
    assert runner._batch.request_ids.tolist() == [0, 1]
    assert runner._batch.seq_lens.tolist() == [6, 11]
    assert runner._batch.prompt_lens.tolist() == [5, 11]
    assert pools.token_ids[resumed.row, :7].tolist() == resumed.known_ids


def test_a_copy_is_read_on_the_host(device):
    """Tensors may be in one storage, between others and in another order."""
    raw = torch.arange(64, dtype=torch.uint8, device=device)
    tensors = {
        "a": torch.tensor([0.5, 1.5, 2.5], device=device),
        "b": torch.arange(6, device=device).view(2, 3),
        "c": torch.empty(0, 3, device=device),
        "d": raw[24:40].view(torch.int64),
        "e": raw[12:20].view(torch.int32).view(2, 1),
        "f": raw[40:40].view(torch.int32),
    }
    read, expected = HostCopy(tensors).read(), {name: tensor.tolist() for name, tensor in tensors.items()}
    assert {name: tensor.tolist() for name, tensor in read.items()} == expected
    for name, tensor in tensors.items():
        assert (read[name].device.type, read[name].dtype) == ("cpu", tensor.dtype)
        assert read[name].shape == tensor.shape


# Calls without work.


def spied(engine, phases: list[str], monkeypatch) -> list[tuple[str, State]]:
    """Record the input and output states of every phase, in the order of the calls.

    `seed` is the drafter's.
    """
    seen = []

    def spy(owner, name, given, given_name=None):
        phase = getattr(owner, name)

        def call(*arguments, **options):
            result = phase(*arguments, **options)
            seen.extend([(f"{name} takes", arguments[given]), (f"{name} gives", result)])
            return result

        monkeypatch.setattr(owner, name, call)

    for name in phases:
        spy(engine.drafter if name == "seed" else engine, name, 1)
    return seen


IDLE = {
    "reference": dict(),
    "reference, eagle": dict(kind="eagle"),
    "reference, round": dict(config=replace(CONFIG, release="round", extend="ragged")),
    "reference, plain": dict(config=SpecConfig.plain(page_size=4, max_len=64)),
    "fast": dict(impl="fast", bucket=2),
}


@pytest.mark.parametrize("how", IDLE.values(), ids=IDLE)
@pytest.mark.parametrize("lagging", [False, True], ids=["sync", "lagging"])
def test_without_requests_every_phase_runs_on_empty_states(how, lagging, monkeypatch, device):
    """States have the types and shapes of a live call with no rows.

    Nothing is written, and later calls are unaffected.
    """
    column = dict(device=device, graph="eager") if how.get("impl") == "fast" else {}
    runner, engine, pools = make_runner(**how, **column, lagging=lagging)
    phases = ["seed", "prefill", *(["advance"] if how.get("impl") == "fast" else ["draft", "verify", "draft_extend"])]
    seen = spied(engine, phases, monkeypatch)
    before = {name: tensor.clone() for name, tensor in pool_tensors(pools)}
    launched = [runner.prefill(0, [], []), runner.round(0)]
    assert [each.read() for each in launched] == [[], []]
    assert all(torch.equal(bits(before[name]), bits(tensor)) for name, tensor in pool_tensors(pools))
    pools.audit()
    assert runner.requests == []
    idle = list(seen)
    seen.clear()
    (request,) = seat(pools, 2)
    live = [runner.prefill(1, [request], [(0, 3)])]
    for delivery in live[0].read():
        request.take(delivery.token_ids, delivery.logprobs)
    live.append(runner.round(1))
    assert [name for name, _ in idle] == [f"{phase} {way}" for phase in phases for way in ("takes", "gives")]
    assert [name for name, _ in seen] == [name for name, _ in idle]
    for (name, empty), (_, full) in zip(idle, seen, strict=True):
        assert type(empty) is type(full)
        for (field, nothing), (_, something) in zip(named_tensors(empty), named_tensors(full), strict=True):
            assert nothing.dtype == something.dtype, (name, field)
            assert nothing.shape[1:] == something.shape[1:], (name, field)
            assert len(nothing) == (1 if field.endswith("row_starts") else 0), (name, field)
    for nothing, something in zip(launched, live, strict=True):
        empty, full = nothing.results.read(), something.results.read()
        assert {name: tensor.dtype for name, tensor in empty.items()} == {
            name: tensor.dtype for name, tensor in full.items()
        }
    for delivery in live[1].read():
        request.take(delivery.token_ids, delivery.logprobs)
    expected = alone(2, how.get("config", CONFIG)) if how.get("kind") is None else None
    assert expected is None or tuple(request.token_ids) == expected[: len(request.token_ids)]


def pool_tensors(pools):
    for name in ("target", "draft"):
        buffer = getattr(pools, name)
        if buffer is not None:
            yield f"{name} keys", buffer.keys
            yield f"{name} values", buffer.values
    yield "req_to_token", pools.req_to_token
    yield "token_ids", pools.token_ids


def bits(tensor):
    """Convert to bits, in which NaN equals itself."""
    return tensor.contiguous().view(torch.uint8) if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("lagging", [False, True], ids=["sync", "lagging"])
def test_calls_without_work_change_nothing(lagging):
    """Another rank has chunks to fill and this one only its batch, or the other way round."""
    left = []
    for is_idle in (False, True):
        runner, _, pools = make_runner(lagging=lagging)
        requests = seat(pools, 0, 1)
        if is_idle:
            runner.round(0)
        for delivery in prefill(runner, *requests):
            delivery.request.take(delivery.token_ids, delivery.logprobs)
        if is_idle:
            assert runner.prefill(0, [], []).read() == []
        runner.round(1)
        left += [(runner._batch, runner._draft_input)]
    for mine, theirs in zip(*left, strict=True):
        assert_same(mine, theirs)


# Chunks.


def kv_of(buffer, pools, row, columns) -> torch.Tensor:
    slots = pools.req_to_token[row, :columns]
    return torch.stack([buffer.keys[:, slots], buffer.values[:, slots]])


CHUNKS = {
    "whole": [11],
    "1": [1] * 11,
    "2": [2] * 5 + [1],
    "3": [3, 3, 3, 2],
    "7": [7, 4],
    "a page": [4, 4, 3],
    "uneven": [1, 6, 1, 3],
}


def in_chunks(runner, request, sizes):
    """Prefill in chunks, each end before the next.

    Return the last call's results.
    """
    end = 0
    for size in sizes:
        start, end = end, end + size
        launched = runner.prefill(0, [request], [(start, end)])
        yield end, launched


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
def test_chunks_leave_the_kv_of_the_whole_prompt(kind, sizes):
    """At each boundary the draft slot of the chunk's last column already holds the next token (sglang#26329)."""
    whole, _, whole_pools = make_runner(kind=kind)
    (expected,) = seat(whole_pools, 1)
    first = prefill(whole, expected)
    runner, _, pools = make_runner(kind=kind)
    (request,) = seat(pools, 1)
    for end, launched in in_chunks(runner, request, sizes):
        for mine, theirs in ((pools.target, whole_pools.target), (pools.draft, whole_pools.draft)):
            filled = kv_of(mine, pools, request.row, end)
            torch.testing.assert_close(
                filled, kv_of(theirs, whole_pools, expected.row, end), rtol=0, atol=1e-12, msg=f"{kind}, column {end}"
            )
        assert runner.requests == ([request] if end == 11 else [])
        assert len(launched.read()) == (end == 11)
    assert launched.read()[0].token_ids == first[0].token_ids
    assert launched.read()[0].logprobs == pytest.approx(first[0].logprobs, abs=1e-6)
    assert runner._draft_input.topk_index.tolist() == whole._draft_input.topk_index.tolist()
    assert_same(runner._draft_input, whole._draft_input, rtol=0, atol=1e-6)
    torch.testing.assert_close(runner._draft_input.hidden, whole._draft_input.hidden, rtol=0, atol=1e-12)
    assert pools.token_ids[request.row].tolist() == whole_pools.token_ids[expected.row].tolist()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("end", [1, 2, 3, 4, 7])
def test_the_draft_slot_at_a_boundary_is_that_of_the_next_token(kind, end):
    """Two prompts differ after the chunk, which only the draft KV of its last column shows."""
    runner, _, pools = make_runner(kind=kind)
    prompts = [[*PROMPTS[1][:end], tail, 20, 21] for tail in (12, 13)]
    first, second = seat(pools, 0, 1, prompts=prompts)
    runner.prefill(0, [first, second], [(0, end)] * 2)
    target, draft = (
        [kv_of(buffer, pools, request.row, end) for request in (first, second)]
        for buffer in (pools.target, pools.draft)
    )
    torch.testing.assert_close(*target, rtol=0, atol=1e-12)
    torch.testing.assert_close(draft[0][:, :, :-1], draft[1][:, :, :-1], rtol=0, atol=1e-12)
    assert not torch.isclose(draft[0][:, :, -1], draft[1][:, :, -1]).any()


def test_chunks_of_several_requests_share_a_call():
    """One starts, one continues, one ends, one is whole."""
    runner, _, pools = make_runner()
    requests = seat(pools, 0, 1, 2, 3)
    first, second, third, fourth = requests
    runner.prefill(0, [second, fourth], [(0, 3), (0, 6)])
    deliveries = runner.prefill(1, [first, second, fourth, third], [(0, 2), (3, 7), (6, 8), (0, 3)]).read()
    assert [delivery.request for delivery in deliveries] == [fourth, third]
    deliveries += runner.prefill(2, [second, first], [(7, 11), (2, 5)]).read()
    assert runner.requests == [fourth, third, second, first]
    for delivery in deliveries:
        delivery.request.take(delivery.token_ids, delivery.logprobs)
    for step in range(3):
        for delivery in runner.round(step).read():
            delivery.request.take(delivery.token_ids, delivery.logprobs)
    for request in requests:
        assert len(request.token_ids) >= 4
        assert tuple(request.token_ids) == alone(request.request_id)[: len(request.token_ids)]


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [2, 4], [5, 1]], ids=str)
def test_a_resumed_request_continues_from_its_last_token(sizes):
    """Its prompt ends inside a chunk, at its end, or before it, and no token is sampled again."""
    runner, _, pools = make_runner()
    (request,) = seat(pools, 0)
    request.take(alone(0)[:2], [0.0, 0.0])
    for _, launched in in_chunks(runner, request, sizes):
        assert launched.read() == []
    assert runner._draft_input.bonus_tokens.tolist() == [alone(0)[1]]
    for step in range(3):
        for delivery in runner.round(step).read():
            request.take(delivery.token_ids, delivery.logprobs)
    assert tuple(request.token_ids) == alone(0)[: len(request.token_ids)]


# Leaving.


@pytest.mark.parametrize("gone", [[0], [1], [3], [0, 2], [1, 2], [3, 0], [0, 1, 2], []], ids=str)
def test_requests_leave_by_index(gone):
    runner, _, pools = make_runner()
    requests = seat(pools, 0, 1, 2, 3)
    prefill(runner, *requests)
    batch, draft_input = runner._batch, runner._draft_input
    runner.drop([requests[place] for place in gone])
    kept = [place for place in range(4) if place not in gone]
    assert runner.requests == [requests[place] for place in kept]
    assert_same(runner._batch, batch.filter(torch.tensor(kept)))
    assert_same(runner._draft_input, draft_input.filter(torch.tensor(kept)))


def test_only_requests_in_the_batch_can_leave_it():
    runner, _, pools = make_runner()
    first, second, other = seat(pools, 0, 1, 2)
    prefill(runner, first, second)
    batch, draft_input = runner._batch, runner._draft_input
    runner.drop([other])
    assert runner.requests == [first, second]
    assert runner._batch is batch
    assert runner._draft_input is draft_input
    runner.drop([other, first])
    assert runner.requests == [second]


def test_an_empty_batch_gets_the_idle_state_and_others_join(monkeypatch):
    """It is a new state, not the last round's output filtered to nothing."""
    runner, engine, pools = make_runner()
    requests = seat(pools, 0, 1)
    prefill(runner, *requests)
    for delivery in runner.round(1).read():
        delivery.request.take(delivery.token_ids, delivery.logprobs)
    idle = engine.drafter.idle()
    monkeypatch.setattr(engine.drafter, "idle", lambda: idle)
    runner.drop(requests)
    assert runner._draft_input is idle
    assert isinstance(idle, DraftInput)
    assert (runner.requests, runner._batch.size, idle.is_idle) == ([], 0, True)
    runner.round(2)
    (request,) = seat(pools, 3)
    for delivery in prefill(runner, request):
        request.take(delivery.token_ids, delivery.logprobs)
    for step in range(3):
        for delivery in runner.round(step).read():
            request.take(delivery.token_ids, delivery.logprobs)
    assert tuple(request.token_ids) == alone(3)[: len(request.token_ids)]


def test_a_lagging_fast_runner_reads_each_round_s_own_result(device):
    """A round's results are their own copy, even from one graph.

    A request leaves while one is unread.
    """
    runner, _, pools = make_runner(impl="fast", lagging=True, device=device, graph="round", bucket=2)
    requests = seat(pools, 0, 2)
    launched = [runner.prefill(0, requests, [(0, 5), (0, 3)]), runner.round(0), runner.round(1)]
    runner.drop(requests[:1])
    launched.append(runner.round(2))
    for each in launched:
        for delivery in each.read():
            delivery.request.take(delivery.token_ids, delivery.logprobs)
    for request in requests:
        assert tuple(request.token_ids) == alone(request.request_id)[: len(request.token_ids)]
