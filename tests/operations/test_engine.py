"""Both engines: rounds end to end, and changes that must not affect their results."""

from dataclasses import fields, replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.phases import PrefillInput
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine

from .rounds import CHAIN, EXACT, prefilled

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3, list(range(47, 20, -1))]
WARM = SamplingParams(temperature=1.0, max_new_tokens=24, seed=7)
TREE = SpecConfig(topk=4, num_steps=4, num_draft_tokens=12, page_size=4)
LANES = SpecConfig(topk=3, num_steps=3, num_draft_tokens=10, page_size=4, verifier="multi_round")
SAMPLED = [LANES, *(replace(CHAIN, verifier=name) for name in ("rejection", "block", "gumbel"))]


def tokens(pair, config, sampling=WARM, prompts=PROMPTS):
    return [output.token_ids for output in generate(pair, prompts, config, sampling, engine=EXACT).outputs]


def start(pair, config, prompts=PROMPTS):
    return prefilled(pair, config, EXACT, prompts, [WARM] * len(prompts))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_every_accepted_count_occurs_with_the_synthetic_pair(kind):
    result = generate(synthetic_pair(kind), PROMPTS, TREE, replace(WARM, max_new_tokens=120))
    counts = {count for output in result.outputs for count in output.num_accepted_tokens_per_round}
    assert counts == set(range(1, TREE.num_steps + 2))


def test_more_noise_means_less_agreement():
    sampling = SamplingParams(max_new_tokens=64)
    lengths = [
        generate(synthetic_pair("eagle", noise=n), PROMPTS, TREE, sampling).acceptance.accept_length
        for n in (0, 0.1, 1)
    ]
    assert lengths[0] > lengths[1] > lengths[2]


@pytest.mark.parametrize(
    "config", [TREE, replace(TREE, release="round", extend="ragged"), SpecConfig.plain(), *SAMPLED]
)
def test_an_idle_batch_passes_through_every_phase(config):
    engine, batch, draft_input, pools = start(synthetic_pair("eagle3"), config)
    none = torch.empty(0, dtype=torch.int64)
    idle = engine.drafter.idle()
    _, output, after_round = engine.round(batch.filter(none), idle, pools)
    assert output.verdict.accepted_tokens() == []
    assert (getattr(draft_input, "draft_prob", None) is not None) == config.has_draft_prob
    for field in fields(draft_input):
        expected, found, live = (getattr(state, field.name) for state in (idle, after_round, draft_input))
        if live is None:
            assert expected is None
            assert found is None
            continue
        assert found.shape == expected.shape
        assert found.shape[1:] == live.shape[1:]
        assert found.dtype == live.dtype


def test_merging_with_the_idle_state_changes_nothing():
    engine, _, draft_input, _ = start(synthetic_pair("eagle3"), LANES)
    merged = engine.drafter.idle().merge(draft_input)
    assert all(torch.equal(merged.tensors[name], tensor) for name, tensor in draft_input.tensors.items())


@pytest.mark.parametrize("config", [TREE, SpecConfig.plain(page_size=4)])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunked_prefill_starts_the_same_round(config, chunk):
    """A chunk that is not the last gives the drafter the next known token."""
    pair, prompt = synthetic_pair("eagle3"), PROMPTS[3]
    _, batch, expected, _ = start(pair, config, [prompt])
    engine = load_engine(pair, config, EXACT)
    pools = engine.make_pools(1, 512)
    row = pools.open()
    pools.reserve(row, len(prompt))
    for low in range(0, len(prompt), chunk):
        high = min(low + chunk, len(prompt))
        known = prompt[high] if high < len(prompt) else -1
        part = PrefillInput(
            input_ids=torch.tensor(prompt[low:high]),
            row_starts=torch.tensor([0, high - low]),
            start_lens=torch.tensor([low]),
            next_tokens=torch.tensor([known]),
        )
        chunk_batch = replace(batch, req_pool_indices=torch.tensor([row]), seq_lens=torch.tensor([high]))
        output = engine.prefill(chunk_batch, part, pools)
    assert torch.equal(output.draft_input.bonus_tokens, expected.bonus_tokens)
    if not config.is_plain:
        assert torch.equal(output.draft_input.topk_index, expected.topk_index)
        torch.testing.assert_close(output.draft_input.hidden, expected.hidden, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [TREE, *SAMPLED])
def test_a_resumed_request_continues_as_if_never_preempted(config):
    """Preemption frees everything, prefills committed tokens again, and keeps the known bonus token as root.

    Sampled drafts are the same as without it.
    """
    engine, batch, draft_input, pools = start(synthetic_pair("eagle3"), config, [PROMPTS[0]])
    for _ in range(3):
        _, output, draft_input = engine.round(batch, draft_input, pools)
        batch = batch.after(output.verdict.num_accepted_tokens)
    _, expected, _ = engine.round(batch, draft_input, pools)
    row, length = int(batch.req_pool_indices[0]), int(batch.seq_lens[0])
    committed, bonus = pools.token_ids[row, :length].clone(), draft_input.bonus_tokens.long()
    pools.close(row)
    again = pools.open()
    pools.reserve(again, length)
    batch = replace(batch, req_pool_indices=torch.tensor([again]))
    prefill = PrefillInput(committed, torch.tensor([0, length]), torch.tensor([0]), bonus)
    _, resumed, _ = engine.round(batch, engine.prefill(batch, prefill, pools).draft_input, pools)
    assert resumed.verdict.accepted_tokens() == expected.verdict.accepted_tokens()
    torch.testing.assert_close(resumed.target_logits, expected.target_logits, rtol=0, atol=1e-10)


def test_release_round_owns_the_committed_pages_between_rounds():
    engine, batch, draft_input, pools = start(synthetic_pair("eagle3"), replace(TREE, release="round"))
    for _ in range(4):
        _, output, draft_input = engine.round(batch, draft_input, pools)
        batch = batch.after(output.verdict.num_accepted_tokens)
        owned = [pools.owned_columns(row) for row in batch.req_pool_indices.tolist()]
        assert owned == [-(-length // 4) * 4 for length in batch.seq_lens.tolist()]
        pools.audit()


def test_release_finish_never_shrinks():
    engine, batch, draft_input, pools = start(synthetic_pair("eagle3"), TREE)
    before = [0] * batch.size
    for _ in range(4):
        _, output, draft_input = engine.round(batch, draft_input, pools)
        owned = [pools.owned_columns(row) for row in batch.req_pool_indices.tolist()]
        assert owned == [TREE.reserved_columns(length) for length in batch.seq_lens.tolist()]
        assert all(now >= then for now, then in zip(owned, before, strict=True))
        before, batch = owned, batch.after(output.verdict.num_accepted_tokens)


def test_the_gumbel_coupling_gives_any_drafter_the_same_tokens():
    """Plain decoding too: noise belongs to a position, and a draft there only changes how soon it is known."""
    filtered = replace(WARM, temperature=0.8, top_k=20, top_p=0.9, frequency_penalty=0.3)
    chain, plain = SAMPLED[3], replace(SpecConfig.plain(page_size=4), verifier="gumbel")
    expected = tokens(synthetic_pair("eagle3"), plain, filtered, PROMPTS[:2])
    for pair in (synthetic_pair("eagle3"), synthetic_pair("eagle"), synthetic_pair("eagle", noise=1.0)):
        assert tokens(pair, chain, filtered, PROMPTS[:2]) == expected


def test_states_are_not_changed_by_the_phases_that_read_them():
    engine, batch, draft_input, pools = start(synthetic_pair("eagle3"), TREE)
    kept = {name: tensor.clone() for name, tensor in draft_input.tensors.items()}
    _, output, _ = engine.round(batch, draft_input, pools)
    assert all(torch.equal(kept[name], getattr(draft_input, name)) for name in kept)
    assert torch.equal(output.verdict.num_accepted_drafts + 1, output.verdict.num_accepted_tokens)
    assert output.verdict.accept_index.shape == (batch.size, TREE.num_steps + 1)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(TREE, max_len=513), ("max_len", 513)),
        (SpecConfig(topk=43, num_steps=2, num_draft_tokens=8), ("topk", 43)),
    ],
)
def test_a_setting_that_does_not_fit_the_pair_is_refused(config, field):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == field):
        load_engine(synthetic_pair("eagle3"), config)


def test_speculation_without_a_drafter_is_refused():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("num_steps", 4)):
        load_engine(replace(synthetic_pair("eagle3"), drafter=None), TREE)


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"graph": "round"}, {"bucket": 2}, {"batch_invariant": True}])
def test_the_reference_refuses_an_option_of_the_fast_engine(option):
    with pytest.raises(InputError, check=lambda error: error.name in option):
        EngineOptions(**option)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_the_synthetic_drafter_is_accepted_4_times_in_10(kind, family):
    chain = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
    accepted = generate(synthetic_pair(kind, family), PROMPTS * 3, chain, replace(WARM, max_new_tokens=40)).acceptance
    assert 0.25 < accepted.accepted_by_position[0] < 0.55
