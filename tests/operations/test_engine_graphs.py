"""Rounds of the fast engine are the same in every graph mode, at any padding and in any pool."""

import warnings
from dataclasses import dataclass, fields, replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.phases import State
from specsim.fast import layers
from specsim.fast.model import linear
from specsim.fast.runtime.buffers import GuardError
from specsim.models.synthetic_pair import synthetic_pair

from .rounds import CHAIN, prefilled

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3, list(range(47, 20, -1))]
WARM = SamplingParams(temperature=1.0, max_new_tokens=24, seed=7)
LANES = SpecConfig(topk=3, num_steps=3, num_draft_tokens=10, page_size=4, verifier="multi_round")
SAMPLED = [LANES, *(replace(CHAIN, verifier=name) for name in ("rejection", "block", "gumbel"))]
SMALL = SpecConfig(topk=3, num_steps=3, num_draft_tokens=7, page_size=4)
RAGGED = replace(SMALL, extend="ragged")
PLAIN = SpecConfig.plain(page_size=4)
FOUR = [PROMPTS[0], PROMPTS[1], PROMPTS[2], [9, 8, 7, 6]]


def fast_start(pair, config, device, prompts=FOUR, graph="eager", bucket=None, params=None, grammars=None, **options):
    """Make a fast engine, or for graph `reference` the reference: (engine, batch, draft input, pools) after prefill."""
    where = "fast", torch.float32, device, graph, bucket
    engine_options = EngineOptions() if graph == "reference" else EngineOptions(*where, **options)
    params = params or [replace(WARM, temperature=float(index % 2)) for index in range(len(prompts))]
    return prefilled(pair, config, engine_options, prompts, params, grammars=grammars)


def fast_rounds(engine, batch, draft_input, pools, count=2):
    """List all results of `count` rounds, tensor by tensor: every phase's output, then both pools."""
    left = {}
    for number in range(count):
        states = engine.round(batch, draft_input, pools)
        left |= {f"round {number}, {name}": tensor for name, tensor in named_tensors(states._asdict())}
        draft_input, batch = states.draft_input, batch.after(states.verify_output.verdict.num_accepted_tokens)
    left |= {"token_ids": pools.token_ids, "req_to_token": pools.req_to_token, "target keys": pools.target.keys}
    return left | ({"draft keys": pools.draft.keys} if pools.draft else {})


def named_tensors(value, name=""):
    if isinstance(value, torch.Tensor):
        yield name, value
    parts = (
        value
        if isinstance(value, dict)
        else {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, State)
        else {}
    )
    for part, inner in parts.items():
        yield from named_tensors(inner, f"{name}.{part}".strip("."))


def assert_bitwise_equal(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(bits(tensor), bits(second[name])), name


def bits(tensor):
    """Convert to bits, in which NaN equals itself."""
    return tensor.contiguous().view(torch.uint8) if tensor.is_floating_point() and tensor.numel() else tensor


MODE_CONFIGS = {
    "chain": CHAIN,
    "ancestor, ragged": replace(SMALL, draft_kv="ancestor", extend="ragged", page_size=1),
    "one step": SpecConfig(topk=3, num_steps=1, num_draft_tokens=4, page_size=2),
    "plain": PLAIN,
    "naive eagle": SpecConfig.preset("naive-eagle"),
    "naive eagle, more steps and larger pages": SpecConfig.preset("naive-eagle", num_steps=2, page_size=4),
}


@pytest.mark.by_default("ancestor, ragged", "one step", "plain")
@pytest.mark.parametrize(
    "config",
    [pytest.param(SMALL, id="tree"), *(pytest.param(MODE_CONFIGS[name], id=name) for name in MODE_CONFIGS)],
)
def test_graph_modes_agree_bitwise(config, device):
    pair = synthetic_pair("eagle3", num_layers=1)
    eager = fast_rounds(*fast_start(pair, config, device, FOUR[:3]))
    for graph in ("step", "phase", "round"):
        assert_bitwise_equal(eager, fast_rounds(*fast_start(pair, config, device, FOUR[:3], graph)))


def advances(engine, batch, draft_input, pools, keep):
    """List the states of four rounds of a serving loop, one of them a whole round.

    A request leaves after two.
    """
    left = {}
    for number in range(4):
        if number == 1:
            _, output, draft_input = engine.round(batch, draft_input, pools)
            verdict = output.verdict
            batch = batch.after(verdict.num_accepted_tokens)
        else:
            verdict, draft_input, batch, _ = engine.advance(batch, draft_input, pools)
        states = {"verdict": verdict, "draft_input": draft_input, "batch": batch}
        left |= {f"round {number}, {name}": tensor for name, tensor in named_tensors(states)}
        if number == 2:
            batch, draft_input = batch.filter(keep), draft_input.filter(keep)
    return left | {"token_ids": pools.token_ids, "target keys": pools.target.keys}


@pytest.mark.parametrize(
    ("config", "bucket"),
    [
        (RAGGED, 4),
        (PLAIN, 3),
        *(pytest.param(*each, marks=pytest.mark.whole) for each in [(SMALL, 3), (SMALL, 4), (RAGGED, 3), (PLAIN, 4)]),
    ],
)
def test_advancing_agrees_with_whole_rounds_in_every_mode(config, bucket, device):
    pair, keep, left = synthetic_pair("eagle3", num_layers=1), torch.tensor([2, 0], device=device), []
    for graph in ("eager", "step", "phase", "round"):
        left.append(advances(*fast_start(pair, config, device, FOUR[:3], graph, bucket), keep))
    for other in left[1:]:
        assert_bitwise_equal(left[0], other)
    engine, batch, draft_input, pools = fast_start(pair, config, device, FOUR[:3], "round", bucket)
    engine.advance = lambda *state: engine.round(*state).advance(state[0])
    assert_bitwise_equal(left[0], advances(engine, batch, draft_input, pools, keep))


@pytest.mark.parametrize("extend", ["fixed", "ragged"])
def test_eight_rounds_are_enqueued_without_waiting(extend):
    if not torch.cuda.is_available():
        pytest.skip("without a GPU there is nothing that the host could wait for")
    config = replace(SMALL, extend=extend)
    engine, batch, draft_input, pools = fast_start(synthetic_pair("eagle3"), config, "cuda", FOUR[:3], "round")
    for row, length in batch.rows_and_lens:
        pools.reserve(row, config.reserved_columns(length + 8 * config.num_steps + 8))
    before, results = engine.advance(batch, draft_input, pools, reserved=True), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        after = before
        for _ in range(8):
            after = engine.advance(after.batch, after.draft_input, pools, reserved=True)
            results.append(after)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    again = before
    for each in results:
        output = engine.round(again.batch, again.draft_input, pools, reserved=True)
        assert each.verdict.accepted_tokens() == output.verify_output.verdict.accepted_tokens()
        again = output.advance(again.batch)


def test_graph_modes_agree_bitwise_where_pages_move_in_a_round(device):
    pair, config = synthetic_pair("eagle"), replace(SMALL, release="round", extend="ragged")
    eager = fast_rounds(*fast_start(pair, config, device, FOUR[:3]))
    for graph in ("step", "phase"):
        assert_bitwise_equal(eager, fast_rounds(*fast_start(pair, config, device, FOUR[:3], graph)))


@pytest.mark.parametrize("graph", ["reference", "eager", "step", "phase"])
def test_release_round_owns_each_requests_accepted_path(graph, device):
    """A request owns all tree nodes during verify and then its accepted path, some requests more than others."""
    pair, config = synthetic_pair("eagle"), replace(SMALL, release="round", page_size=1)
    engine, batch, draft_input, pools = fast_start(pair, config, device, FOUR[:3], graph)
    verify_input = engine.draft(batch, draft_input, pools)
    assert owned(batch, pools) == [length + config.num_draft_tokens for _, length in batch.rows_and_lens]
    counts = engine.verify(batch, verify_input, pools).verdict.num_accepted_tokens.tolist()
    assert owned(batch, pools) == [
        length + count for (_, length), count in zip(batch.rows_and_lens, counts, strict=True)
    ]
    assert len(set(counts)) > 1


def owned(batch, pools) -> list[int]:
    return [pools.owned_columns(row) for row, _ in batch.rows_and_lens]


def test_a_fast_round_owns_the_columns_that_it_needs(device):
    engine, batch, draft_input, pools = fast_start(synthetic_pair("eagle3"), SMALL, device, FOUR[:2])
    engine.round(batch, draft_input, pools)
    assert owned(batch, pools) == [SMALL.reserved_columns(length) for _, length in batch.rows_and_lens]


@pytest.mark.parametrize("graph", ["eager", "round"])
def test_padded_rows_change_no_real_row(graph, device):
    """Three requests in a bucket of four have the same bits with padding and with a fourth request."""
    pair = synthetic_pair("eagle3")
    engine, batch, draft_input, pools = fast_start(pair, SMALL, device, FOUR, graph)
    three = torch.arange(3, device=device)
    padded = engine.round(batch.filter(three), draft_input.filter(three), pools)
    engine, batch, draft_input, pools = fast_start(pair, SMALL, device, FOUR, graph)
    full = engine.round(batch, draft_input, pools)
    for (name, mine), (_, theirs) in zip(named_tensors(padded._asdict()), named_tensors(full._asdict()), strict=True):
        assert torch.equal(bits(mine), bits(theirs[: len(mine)])), name


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_batch_invariance_reaches_every_product_and_attention(batch_invariant, kind, device, monkeypatch):
    """All products of target and drafter get the option, in prefill and round.

    Their own tests check its effect.
    """
    told = {"choose": set(), "attention": set()}

    def choose(*shape_and_type, _choose=linear.choose):
        told["choose"].add(shape_and_type[4])
        return _choose(*shape_and_type)

    def attention(*args, invariant, _attention=layers.attention):
        told["attention"].add(invariant)
        return _attention(*args, invariant=invariant)

    monkeypatch.setattr(linear, "choose", choose)
    monkeypatch.setattr(layers, "attention", attention)
    options = EngineOptions("fast", device=device, batch_invariant=batch_invariant)
    engine, batch, draft_input, pools = prefilled(synthetic_pair(kind), SMALL, options, PROMPTS[:1], [WARM])
    engine.round(batch, draft_input, pools)
    assert told == {"choose": {batch_invariant}, "attention": {batch_invariant}}


@pytest.mark.by_default("eager", "round")
@pytest.mark.parametrize("graph", ["eager", "step", "phase", "round"])
def test_a_snapshot_holds_the_draft_kv_of_the_draft_phase(graph, device):
    pair = synthetic_pair("eagle3")
    engine, batch, draft_input, pools = fast_start(pair, SMALL, device, FOUR[:3])
    engine.draft(batch, draft_input, pools)
    drafted = {name: bits(getattr(pools.draft, name)).clone() for name in ("keys", "values")}
    engine, batch, draft_input, pools = fast_start(pair, SMALL, device, FOUR[:3], graph)
    pools.draft.keep_snapshot()
    left = fast_rounds(engine, batch, draft_input, pools, count=1)
    for name, expected in drafted.items():
        assert torch.equal(expected, bits(getattr(pools.draft.snapshot, name)))
        assert not torch.equal(expected, bits(getattr(pools.draft, name)))
    assert_bitwise_equal(left, fast_rounds(*fast_start(pair, SMALL, device, FOUR[:3], graph), count=1))


@pytest.mark.parametrize("graph", ["eager", "step", "phase", "round"])
@pytest.mark.parametrize("config", [SMALL, PLAIN])
def test_an_idle_batch_passes_through_every_fast_phase(graph, config, device):
    engine, batch, _, pools = fast_start(synthetic_pair("eagle3"), config, device, FOUR[:1], graph)
    before = {name: bits(tensor).clone() for name, tensor in (("keys", pools.target.keys), ("ids", pools.token_ids))}
    none, idle = torch.empty(0, dtype=torch.int64, device=device), engine.drafter.idle()
    states = engine.round(batch.filter(none), idle, pools)
    assert states.verify_output.verdict.accepted_tokens() == []
    kinds = [{n: (t.shape, t.dtype) for n, t in state.tensors.items()} for state in (idle, states.draft_input)]
    assert kinds[0] == kinds[1]
    assert torch.equal(before["keys"], bits(pools.target.keys))
    assert torch.equal(before["ids"], pools.token_ids)


def test_a_second_pool_gets_buffers_and_graphs_of_its_own(device):
    pair = synthetic_pair("eagle3")
    engine, *first = fast_start(pair, SMALL, device, FOUR[:2], "round")
    expected = fast_rounds(engine, *first)
    _, *second = fast_start(pair, SMALL, device, FOUR[:2], "round")
    assert_bitwise_equal(expected, fast_rounds(engine, *second))


def test_a_write_next_to_static_buffers_is_found_after_the_phase(device):
    engine, batch, draft_input, pools = fast_start(synthetic_pair("eagle"), SMALL, device, FOUR[:2])
    frame = engine._frames.load(batch, pools)
    predict = frame.verdict.predict
    whole = torch.empty(0, dtype=torch.int32, device=device).set_(predict.untyped_storage())
    whole[predict.storage_offset() - 1] = 7
    # On a GPU there is no check by default, as the host would have to wait.
    check = frame.buffers.check if device == "cuda" else lambda: engine.round(batch, draft_input, pools)
    with pytest.raises(GuardError, check=lambda error: (error.side, error.name) == ("before", "verdict.predict")):
        check()


@dataclass
class Only:
    """A grammar of one repeated token, and its matcher."""

    token: int
    vocab_size: int = 48
    has_ended: bool = False

    def matcher(self):
        return self

    def allowed(self):
        return torch.arange(self.vocab_size) == self.token

    def advance(self, token):
        return token == self.token

    def roll_back(self, count):
        pass


def test_prefill_and_rounds_use_the_grammar_of_a_request(device):
    """Requests 0 and 2 each have their own grammar.

    Padding has none, although it has the id 0.
    """
    pair, plain, params = synthetic_pair("eagle3"), SpecConfig.plain(), [SamplingParams(max_new_tokens=2)] * 3
    free = generate(pair, FOUR[:3], plain, params).outputs
    start = pair, plain, device, FOUR[:3], "phase", 4, params
    engine, batch, draft_input, pools = fast_start(*start, grammars={0: Only(7), 2: Only(9)})
    output = engine.round(batch, draft_input, pools).verify_output
    assert [*zip(draft_input.bonus_tokens.tolist(), output.verdict.predict.tolist(), strict=True)] == [
        (7, 7),
        free[1].token_ids,
        (9, 9),
    ]
    assert 7 not in free[0].token_ids


@pytest.mark.parametrize(
    ("changes", "options", "field"),
    [
        ({}, {"bucket": 2}, ("bucket", 2)),
        ({}, {"bucket": 0}, ("bucket", 0)),
        ({}, {"graph": "whole"}, ("graph", "whole")),
        ({"release": "round"}, {"graph": "round"}, ("graph", "round")),
        ({"max_len": 513}, {}, ("max_len", 513)),
    ],
)
def test_a_fast_setting_that_cannot_run_is_refused(changes, options, field):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == field):
        generate(synthetic_pair("eagle3"), FOUR[:3], replace(SMALL, **changes), engine=EngineOptions("fast", **options))


def test_the_fast_engine_continues_prompts_as_the_reference(device):
    """This is a smoke test.

    specsim.correctness.differential makes the full comparison.
    """
    pair, sampling = synthetic_pair("eagle3"), [replace(WARM, max_new_tokens=8, temperature=t) for t in (0.0, 1.0, 0.7)]
    fast = generate(pair, FOUR[:3], SMALL, sampling, engine=EngineOptions("fast", device=device))
    reference = generate(pair, FOUR[:3], SMALL, sampling)
    for mine, theirs in zip(fast.outputs, reference.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.num_accepted_tokens_per_round == theirs.num_accepted_tokens_per_round
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.whole
def test_prompts_and_batches_larger_than_a_tile_run(device):
    """Interpreted programs take all rows of a launch, up to the largest tile of 2²⁰ entries."""
    pair, prompt = synthetic_pair("eagle", num_layers=1), [[index % 48 for index in range(500)]]
    sampling = SamplingParams(max_new_tokens=2)
    fast = generate(pair, prompt * 34, SMALL, sampling, engine=EngineOptions("fast")).outputs
    (reference,) = generate(pair, prompt, SMALL, sampling).outputs
    assert [output.token_ids for output in fast] == [reference.token_ids] * 34


def test_phases_can_be_called_separately_in_every_mode(device):
    """Products must not depend on the number of rows: a GPU's graphs pad short prompts."""
    pair, left = synthetic_pair("eagle3"), []
    for graph in ("eager", "phase", "round"):
        engine, batch, draft_input, pools = fast_start(pair, SMALL, device, FOUR[:2], graph, batch_invariant=True)
        verify_input = engine.draft(batch, draft_input, pools)
        verify_output = engine.verify(batch, verify_input, pools)
        next_input = engine.draft_extend(batch, verify_output.draft_extend_input, pools)
        left.append(dict(named_tensors({"tree": verify_input, "output": verify_output, "next": next_input})))
    assert_bitwise_equal(left[0], left[1])
    assert_bitwise_equal(left[0], left[2])
