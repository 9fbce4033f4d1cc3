"""Language models of their own as drafters, against transformers, the oracle and plain decoding."""

from dataclasses import replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.pair import DrafterCheckpoint, Pair
from specsim.core.phases import Batch, PrefillInput
from specsim.correctness.differential import Cell
from specsim.correctness.differential.oracle import compare_with_oracle
from specsim.fast.kv import draft_rows as fast_draft_rows
from specsim.models.synthetic_pair import bridged_pair, synthetic_pair
from specsim.reference.kv import draft_rows
from specsim.serving.generation import generate, load_engine
from specsim.serving.requests import make_requests
from specsim.serving.scheduler import Scheduler

from .served import served

PROMPTS = ((5, 17, 3, 40, 8, 9, 30), (1, 2, 3, 4), (30,))
EXACT = EngineOptions(dtype=torch.float64)
FAST = EngineOptions(impl="fast")
FAMILIES = ["llama", "qwen3", "mistral"]
WINDOW = {"mistral": 7}
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
    "target_only": TREE,
}
every_mode = pytest.mark.parametrize("rows", ["own", "shifted"])


def pair_of(family: str = "llama", rows: str = "own", **changes) -> Pair:
    return synthetic_pair("standalone", family, window=WINDOW.get(family), fields={"rows": rows}, **changes)


def its_own_drafter(family: str = "llama", **changes) -> Pair:
    """Make a pair whose draft model is its target, so that every draft is right."""
    pair = pair_of(family, **changes)
    model = pair.target.config
    config = replace(pair.checkpoint.config, model=model, draft_vocab_size=model.vocab_size)
    return replace(pair, drafter=DrafterCheckpoint(config, pair.target.tensors))


def prefill_of(prompts, chunk: int | None = None) -> PrefillInput:
    return PrefillInput.of_prompts([prompt[:chunk] for prompt in prompts])


# Rows.


@pytest.mark.parametrize("make", [draft_rows, fast_draft_rows], ids=["reference", "fast"])
def test_own_rows_end_with_the_token_after_the_chunk(make, device):
    device = device if make is fast_draft_rows else "cpu"
    prefill = prefill_of(PROMPTS).to(device)
    rows = make(prefill, torch.tensor([20, 21, 22], device=device), 1)
    expected = [*PROMPTS[0], 20, *PROMPTS[1], 21, *PROMPTS[2], 22]
    assert (rows.input_ids.tolist(), rows.row_starts.tolist()) == (expected, [0, 8, 13, 15])
    assert rows.columns.tolist() == [*range(8), *range(5), *range(2)]
    assert rows.last_rows.tolist() == [7, 12, 14]


@pytest.mark.parametrize("make", [draft_rows, fast_draft_rows], ids=["reference", "fast"])
def test_shifted_rows_are_those_of_eagle(make, device):
    device = device if make is fast_draft_rows else "cpu"
    rows = make(prefill_of(PROMPTS).to(device), torch.tensor([20, 21, 22], device=device), 0)
    expected = [*PROMPTS[0][1:], 20, *PROMPTS[1][1:], 21, 22]
    assert (rows.input_ids.tolist(), rows.row_starts.tolist()) == (expected, [0, 7, 11, 12])


def test_an_unknown_kind_of_rows_is_refused():
    with pytest.raises(InputError) as error:
        replace(pair_of().checkpoint.config, rows="left")
    assert error.value.name == "rows"


# Drafts and KV against transformers.


def run(pair: Pair, config: SpecConfig, options: EngineOptions = EXACT, prompt=PROMPTS[0], chunks=(7,)):
    """Yield (tokens with the root, tree, draft keys of all their columns) after every phase that leaves them."""
    engine = load_engine(pair, config, options)
    pools = engine.make_pools(1, 160)
    row = pools.open()
    pools.reserve(row, len(prompt) + 1)
    start = 0
    for end in chunks:
        known = prompt[end] if end < len(prompt) else -1
        part = replace(PrefillInput.of_prompts([prompt[start:end]]), start_lens=torch.tensor([start]))
        part = replace(part, next_tokens=torch.tensor([known]))
        batch = Batch.of([0], [row], [end], [SamplingParams()], pair.target.config.vocab_size)
        batch = replace(batch, prompt_lens=torch.tensor([len(prompt)]))
        batch = batch.to(engine.device)
        draft_input = engine.prefill(batch, part.to(engine.device), pools).draft_input
        start = end
    for _ in range(5):
        length = int(batch.seq_lens)
        tokens = pools.token_ids[row, : length + 1].tolist()
        slots = pools.slots(row, torch.arange(length + 1, device=engine.device))
        keys = pools.draft.keys[:, slots].cpu()
        tree = engine.draft(batch, draft_input, pools)
        yield tokens, tree, keys
        output = engine.verify(batch, tree, pools)
        draft_input = engine.draft_extend(batch, output.draft_extend_input, pools)
        batch = batch.after(output.verdict.num_accepted_tokens)


@pytest.mark.parametrize("chunks", [(7,), (3, 7), (1, 2, 7)], ids=str)
@pytest.mark.parametrize("name", ["chain", "chain, round"])
def test_drafts_are_transformers_continuation(name, chunks, llama_of):
    """A chain is LlamaForCausalLM's greedy continuation; it is given an attention_mask."""
    pair = pair_of(noise=0.1)
    theirs = llama_of(pair.checkpoint.config.model, pair.checkpoint.tensors)
    for tokens, tree, _ in run(pair, SETTINGS[name], chunks=chunks):
        ids = torch.tensor([tokens])
        mask = torch.ones_like(ids)
        out = theirs.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert tree.draft_tokens[0].tolist() == out[0, len(tokens) - 1 :].tolist()


@pytest.mark.every_value
@pytest.mark.parametrize("options", [EXACT, FAST], ids=["reference", "fast"])
@pytest.mark.parametrize("chunks", [(7,), (3, 7)], ids=str)
@pytest.mark.parametrize("name", ["chain", "tree", "tree, round"])
def test_slot_p_holds_the_key_of_token_p(name, chunks, options, llama_of):
    """The root's column is written before its round, and keys equal those of transformers' cache.

    Its norms are computed in float32.
    """
    pair = pair_of(noise=0.1)
    theirs = llama_of(pair.checkpoint.config.model, pair.checkpoint.tensors)
    allowed = 1e-5 if options.dtype == torch.float64 else 1e-4
    for tokens, _, keys in run(pair, SETTINGS[name], options, chunks=chunks):
        cache = theirs(torch.tensor([tokens]), use_cache=True).past_key_values
        expected = torch.stack([cache.layers[layer].keys[0].transpose(0, 1) for layer in range(len(keys))])
        assert (keys.double() - expected).abs().max() < allowed


# A draft model that is the target.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("changes", [{}, {"release": "round", "extend": "ragged"}], ids=["finish", "round"])
def test_every_draft_of_the_target_itself_is_accepted(changes, page_size, family):
    config = replace(CHAIN, page_size=page_size, **changes)
    made = generate(its_own_drafter(family), PROMPTS, config, SamplingParams(max_new_tokens=13), engine=EXACT)
    assert {count for output in made.outputs for count in output.num_accepted_tokens_per_round} == {4}


@pytest.mark.parametrize("name", [name for name in SAMPLED if name != "target_only"])
def test_sampled_drafts_of_the_target_itself_are_accepted(name):
    sampling = [SamplingParams(temperature=0.8, seed=seed, max_new_tokens=13) for seed in range(3)]
    made = generate(its_own_drafter(), PROMPTS, SAMPLED[name], sampling, engine=EXACT)
    assert {count for output in made.outputs for count in output.num_accepted_tokens_per_round} == {4}


@pytest.mark.parametrize("graph", ["eager", "step", "phase", "round"])
def test_fast_accepts_every_draft_of_the_target_itself(graph):
    options = replace(FAST, graph=graph)
    made = generate(its_own_drafter(), PROMPTS, CHAIN, SamplingParams(max_new_tokens=13), engine=options)
    assert {count for output in made.outputs for count in output.num_accepted_tokens_per_round} == {4}


# Serving: draft KV of shared prefixes is exact, as column p holds token p.

SERVED = {
    "prefix cache": dict(prefix_cache=True, max_running=2),
    "chunks": dict(chunk_tokens=3),
    "preemption": dict(num_slots=44, prefix_cache=True),
    "overlap": dict(prefix_cache=True, schedule="overlap"),  # needs release finish
}


@pytest.mark.parametrize(
    ("name", "release"), [(name, release) for name in SERVED for release in ("finish", "round")][:-1]
)
def test_serving_keeps_every_draft_of_the_target_itself_right(name, release):
    config = replace(CHAIN, release=release, page_size=1 if name == "overlap" else 4)
    _, requests = served(its_own_drafter(), config, SERVED[name], EXACT)
    assert {count for request in requests for count in request.accepted} == {4}
    plain = served(its_own_drafter(), SpecConfig.plain(page_size=4), {}, EXACT)[1]
    assert [request.token_ids for request in requests] == [request.token_ids for request in plain]


def test_the_small_pool_preempts_and_the_cache_is_hit():
    trace = served(its_own_drafter(), CHAIN, SERVED["preemption"], EXACT)[0].trace
    assert any(record.preempted for record in trace.records)
    chunks = [chunk for record in trace.records for chunk in record.prefilled]
    assert any(chunk.start > 0 for chunk in chunks)


def test_a_second_turn_continues_the_draft_models_kv():
    pair = its_own_drafter()
    first, second = make_requests(pair, [(3, 4, 5, 6, 7), (8, 9)], SamplingParams(max_new_tokens=9), None, 64)
    second.continues = first.request_id
    scheduler = Scheduler(load_engine(pair, CHAIN, EXACT), ServingConfig(num_slots=160), audits=True)
    scheduler.submit(first)
    scheduler.submit(second)
    with torch.inference_mode():
        scheduler.run()
    scheduler.close()
    assert second.num_reused > 0
    assert {*first.accepted, *second.accepted} == {4}


# Plain decoding and the oracle.


@pytest.mark.by_default("tree, large pages-own", "chain, round-shifted")
@every_mode
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_output_is_that_of_plain_decoding(name, rows):
    pair = pair_of("mistral", rows, noise=0.1)
    config = SETTINGS[name]
    plain = SpecConfig.plain(page_size=config.page_size, max_len=config.max_len)
    sampling = SamplingParams(max_new_tokens=12 if config.page_size > 8 else 8)  # enough to reach another page
    expected = generate(pair, PROMPTS, plain, sampling, engine=EXACT).outputs
    for options in (EXACT, FAST):
        found = generate(pair, PROMPTS, config, sampling, engine=options).outputs
        assert [output.token_ids for output in found] == [output.token_ids for output in expected]


@every_mode
@pytest.mark.parametrize(("name", "family"), [*zip(SAMPLED, FAMILIES * 2, strict=False)])
def test_sampled_rounds_are_the_oracles(name, family, rows):
    sampling = tuple(SamplingParams(temperature=0.9, seed=seed, max_new_tokens=10) for seed in range(3))
    cell = Cell("one", "standalone-llama", PROMPTS, sampling, SAMPLED[name])
    assert compare_with_oracle(cell, pair_of(family, rows, noise=0.1)) == []


@every_mode
@pytest.mark.parametrize(("name", "family"), [*zip(SETTINGS, FAMILIES * 2, strict=True)])
def test_greedy_rounds_are_the_oracles(name, family, rows):
    sampling = tuple(SamplingParams(max_new_tokens=10) for _ in PROMPTS)
    cell = Cell("one", "standalone-llama", PROMPTS, sampling, SETTINGS[name])
    assert compare_with_oracle(cell, pair_of(family, rows, noise=0.1)) == []


@every_mode
@pytest.mark.parametrize(("name", "family"), [*zip((*SAMPLED, *SETTINGS), FAMILIES * 4, strict=False)])
def test_rounds_of_another_vocabulary_are_the_oracles(name, family, rows):
    temperature = 0.9 if name in SAMPLED else 0.0
    sampling = tuple(SamplingParams(temperature=temperature, seed=seed, max_new_tokens=10) for seed in range(3))
    cell = Cell("one", "standalone-llama", PROMPTS, sampling, (SAMPLED | SETTINGS)[name])
    assert compare_with_oracle(cell, bridged_pair(pair_of(family, rows, noise=0.1))) == []
