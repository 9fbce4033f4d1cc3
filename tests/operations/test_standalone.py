"""Language models of their own as drafters, against transformers and the oracle."""

from dataclasses import replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.core.errors import InputError
from specsim.core.pair import DrafterCheckpoint, Pair
from specsim.core.phases import PrefillInput
from specsim.fast.kv import draft_rows as fast_draft_rows
from specsim.models.synthetic_pair import bridged_pair
from specsim.reference.kv import draft_rows
from specsim.serving.generation import generate

from . import rounds
from .rounds import CHAIN, EXACT, FAST, PROMPTS, SAMPLED, SETTINGS, pair_of, served

MODES = ["standalone", "standalone.shifted"]


def its_own_drafter(family: str = "llama", **changes) -> Pair:
    """Make a pair whose draft model is its target, so that every draft is right."""
    pair = pair_of("standalone", family, **changes)
    model = pair.target.config
    config = replace(pair.checkpoint.config, model=model, draft_vocab_size=model.vocab_size)
    return replace(pair, drafter=DrafterCheckpoint(config, pair.target.tensors))


# Rows.


@pytest.mark.parametrize("make", [draft_rows, fast_draft_rows], ids=["reference", "fast"])
def test_own_rows_end_with_the_token_after_the_chunk(make, device):
    """Shifted rows are those of EAGLE."""
    device = device if make is fast_draft_rows else "cpu"
    prefill = PrefillInput.of_prompts(PROMPTS).to(device)
    next_tokens = torch.tensor([20, 21, 22], device=device)
    rows = make(prefill, next_tokens, 1)
    expected = [*PROMPTS[0], 20, *PROMPTS[1], 21, *PROMPTS[2], 22]
    assert (rows.input_ids.tolist(), rows.row_starts.tolist()) == (expected, [0, 8, 13, 15])
    assert rows.columns.tolist() == [*range(8), *range(5), *range(2)]
    assert rows.last_rows.tolist() == [7, 12, 14]
    shifted = make(prefill, next_tokens, 0)
    expected = [*PROMPTS[0][1:], 20, *PROMPTS[1][1:], 21, 22]
    assert (shifted.input_ids.tolist(), shifted.row_starts.tolist()) == (expected, [0, 7, 11, 12])


def test_an_unknown_kind_of_rows_is_refused():
    with pytest.raises(InputError, check=lambda error: error.name == "rows"):
        replace(pair_of("standalone").checkpoint.config, rows="left")


# Drafts and KV against transformers.


@pytest.mark.parametrize("chunks", [(7,), (3, 7), (1, 2, 7)], ids=str)
@pytest.mark.parametrize("name", ["chain", "chain, round"])
def test_drafts_are_transformers_continuation(name, chunks, llama_of):
    """A chain is LlamaForCausalLM's greedy continuation; it is given an attention_mask."""
    pair = pair_of("standalone", noise=0.1)
    theirs = llama_of(pair.checkpoint.config.model, pair.checkpoint.tensors)
    for tokens, tree, *_ in rounds.draft_phases(pair, SETTINGS[name], chunks=chunks):
        ids = torch.tensor([tokens])
        mask = torch.ones_like(ids)
        out = theirs.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert tree.draft_tokens[0].tolist() == out[0, len(tokens) - 1 :].tolist()


@pytest.mark.every_value
@rounds.both
@pytest.mark.parametrize("chunks", [(7,), (3, 7)], ids=str)
@pytest.mark.parametrize("name", ["chain", "tree", "tree, round"])
def test_slot_p_holds_the_key_of_token_p(name, chunks, options, llama_of):
    """The root's column is written before its round, and keys equal those of transformers' cache.

    Its norms are computed in float32.
    """
    pair = pair_of("standalone", noise=0.1)
    theirs = llama_of(pair.checkpoint.config.model, pair.checkpoint.tensors)
    allowed = 1e-5 if options.dtype == torch.float64 else 1e-4
    for tokens, *_, keys in rounds.draft_phases(pair, SETTINGS[name], options, chunks):
        cache = theirs(torch.tensor([tokens]), use_cache=True).past_key_values
        expected = torch.stack([cache.layers[layer].keys[0].transpose(0, 1) for layer in range(len(keys))])
        assert (keys.double() - expected).abs().max() < allowed


# A draft model that is the target.


def assert_every_draft_is_accepted(pair: Pair, config: SpecConfig, sampling, options=EXACT) -> None:
    outputs = generate(pair, PROMPTS, config, sampling, engine=options).outputs
    assert {count for output in outputs for count in output.num_accepted_tokens_per_round} == {4}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("changes", [{}, {"release": "round", "extend": "ragged"}], ids=["finish", "round"])
def test_every_draft_of_the_target_itself_is_accepted(changes, page_size, family):
    config = replace(CHAIN, page_size=page_size, **changes)
    assert_every_draft_is_accepted(its_own_drafter(family), config, SamplingParams(max_new_tokens=13))


@pytest.mark.parametrize("name", [name for name in SAMPLED if name != "target_only"])
def test_sampled_drafts_of_the_target_itself_are_accepted(name):
    sampling = [SamplingParams(temperature=0.8, seed=seed, max_new_tokens=13) for seed in range(3)]
    assert_every_draft_is_accepted(its_own_drafter(), SAMPLED[name], sampling)


@pytest.mark.parametrize("graph", ["eager", "step", "phase", "round"])
def test_fast_accepts_every_draft_of_the_target_itself(graph):
    options = replace(FAST, graph=graph)
    assert_every_draft_is_accepted(its_own_drafter(), CHAIN, SamplingParams(max_new_tokens=9), options)


# Serving: draft KV of shared prefixes is exact, as column p holds token p.


@rounds.every_serving
def test_serving_keeps_every_draft_of_the_target_itself_right(serving, release):
    config = replace(CHAIN, release=release, page_size=1 if serving == "overlap" else 4)
    _, requests = served(its_own_drafter(), config, **rounds.SERVED[serving])
    assert {count for request in requests for count in request.accepted} == {4}
    plain = served(its_own_drafter(), SpecConfig.plain(page_size=4))[1]
    assert [request.token_ids for request in requests] == [request.token_ids for request in plain]


def test_the_small_pool_preempts_and_the_cache_is_hit():
    records = served(its_own_drafter(), CHAIN, **rounds.SERVED["preemption"])[0].trace.records
    assert any(record.preempted for record in records)
    assert any(chunk.start > 0 for record in records for chunk in record.prefilled)


def test_a_second_turn_continues_the_draft_models_kv():
    pair = its_own_drafter()
    first = rounds.request_of(pair, 0, (3, 4, 5, 6, 7), 9)
    second = rounds.request_of(pair, 1, (8, 9), 9, continues=0)
    scheduler = rounds.scheduler_of(pair, [first, second])
    with torch.inference_mode():
        scheduler.run()
    scheduler.close()
    assert second.num_reused > 0
    assert {*first.accepted, *second.accepted} == {4}


# The oracle.


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("is_bridged", [False, True], ids=["same vocabulary", "another vocabulary"])
@rounds.settings_and_families()
def test_rounds_are_the_oracles(name, family, is_bridged, kind):
    pair = pair_of(kind, family, noise=0.1)
    pair = bridged_pair(pair) if is_bridged else pair
    rounds.assert_equal_to_the_oracle(pair, (SETTINGS | SAMPLED)[name], 0.9 if name in SAMPLED else 0.0)
