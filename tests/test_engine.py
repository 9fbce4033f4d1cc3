"""The reference engine: rounds end to end, and what must not change their results."""

from dataclasses import fields, replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate
from specsim.config import InputError
from specsim.generation import load_engine
from specsim.phases import Batch, DraftInput, PrefillInput
from specsim.zoo.agreeing import agreeing_pair

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3, list(range(47, 20, -1))]
WARM = SamplingParams(temperature=1.0, max_new_tokens=24, seed=7)
TREE = SpecConfig(topk=4, num_steps=4, num_draft_tokens=12, page_size=4)


def tokens(pair, config, sampling=WARM, prompts=PROMPTS):
    return [output.token_ids for output in generate(pair, prompts, config, sampling, dtype=torch.float64).outputs]


def start(pair, config, prompts=PROMPTS, num_slots=2048, ids=None):
    """An engine after prefill: (engine, batch, draft input, pools)."""
    engine = load_engine(pair, config, "reference", torch.float64)
    pools = engine.make_pools(len(prompts), num_slots)
    rows, lengths = [pools.open() for _ in prompts], [len(prompt) for prompt in prompts]
    for row, length in zip(rows, lengths, strict=True):
        pools.reserve(row, length)
    params, vocab_size = [WARM] * len(prompts), pair.target.config.vocab_size
    batch = Batch.of(ids or range(len(prompts)), rows, lengths, params, vocab_size)
    return engine, batch, engine.prefill(batch, PrefillInput.whole(prompts), pools).draft_input, pools


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("changes", [{"page_size": 1}, {"page_size": 16}, {"page_size": 256}, {"release": "round"}])
def test_pages_and_release_do_not_change_tokens(kind, changes):
    pair = agreeing_pair(kind)
    assert tokens(pair, replace(TREE, **changes)) == tokens(pair, TREE)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("release", ["finish", "round"])
def test_ragged_and_fixed_draft_extend_agree(kind, release):
    pair = agreeing_pair(kind)
    fixed, ragged = (replace(TREE, extend=extend, release=release) for extend in ("fixed", "ragged"))
    assert tokens(pair, fixed) == tokens(pair, ragged)


@pytest.mark.parametrize("config", [TREE, SpecConfig(topk=1, num_steps=3, num_draft_tokens=4), SpecConfig.plain()])
def test_a_request_is_the_same_alone_and_in_a_batch(config):
    pair = agreeing_pair("eagle3")
    together = tokens(pair, config)
    engine, batch, draft_input, pools = start(pair, config, [PROMPTS[2]], ids=[2])
    alone = [int(draft_input.bonus_tokens[0])]
    while len(alone) < WARM.max_new_tokens:
        _, output, draft_input = engine.round(batch, draft_input, pools)
        alone += output.accepted_tokens()[0]
        batch = batch.after(output.num_accepted_tokens)
    assert tuple(alone[: WARM.max_new_tokens]) == together[2]


@pytest.mark.parametrize("draft_kv", ["lane", "ancestor"])
@pytest.mark.parametrize(("topk", "num_steps", "num_draft_tokens"), [(10, 6, 60), (10, 8, 60), (16, 3, 32)])
def test_wide_trees_leave_greedy_output_alone(topk, num_steps, num_draft_tokens, draft_kv):
    pair, greedy = agreeing_pair("eagle"), SamplingParams(max_new_tokens=24)
    config = SpecConfig(topk, num_steps, num_draft_tokens, page_size=8, draft_kv=draft_kv)
    assert tokens(pair, config, greedy, PROMPTS[:2]) == tokens(pair, SpecConfig.plain(), greedy, PROMPTS[:2])


def test_lane_and_ancestor_draft_differently():
    drafts = []
    for draft_kv in ("lane", "ancestor"):
        engine, batch, draft_input, pools = start(agreeing_pair("eagle"), replace(TREE, draft_kv=draft_kv))
        drafts.append(engine.draft(batch, draft_input, pools).scores)
    assert not torch.equal(*drafts)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_every_accepted_count_occurs_on_the_agreeing_pair(kind):
    result = generate(agreeing_pair(kind), PROMPTS, TREE, replace(WARM, max_new_tokens=120))
    counts = {count for output in result.outputs for count in output.num_accepted_tokens_per_round}
    assert counts == set(range(1, TREE.num_steps + 2))


def test_more_noise_means_less_agreement():
    sampling = SamplingParams(max_new_tokens=64)
    lengths = [
        generate(agreeing_pair("eagle", noise=n), PROMPTS, TREE, sampling).acceptance.accept_length for n in (0, 0.1, 1)
    ]
    assert lengths[0] > lengths[1] > lengths[2]


@pytest.mark.parametrize("config", [TREE, replace(TREE, release="round", extend="ragged"), SpecConfig.plain()])
def test_an_idle_batch_passes_through_every_phase(config):
    engine, batch, draft_input, pools = start(agreeing_pair("eagle3"), config)
    none = torch.empty(0, dtype=torch.int64)
    idle = engine.drafter.idle()
    _, output, after_round = engine.round(batch.filter(none), idle, pools)
    assert output.accepted_tokens() == []
    for field in fields(DraftInput):
        expected, found, live = (getattr(state, field.name) for state in (idle, after_round, draft_input))
        assert found.shape == expected.shape
        assert found.shape[1:] == live.shape[1:]
        assert found.dtype == live.dtype


def test_merging_with_the_idle_state_changes_nothing():
    engine, _, draft_input, _ = start(agreeing_pair("eagle3"), TREE)
    merged = engine.drafter.idle().merge(draft_input)
    assert all(torch.equal(getattr(merged, f.name), getattr(draft_input, f.name)) for f in fields(DraftInput))


@pytest.mark.parametrize("config", [TREE, SpecConfig.plain(page_size=4)])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunked_prefill_starts_the_same_round(config, chunk):
    """A chunk that is not the last hands the drafter the next known token."""
    pair, prompt = agreeing_pair("eagle3"), PROMPTS[3]
    _, batch, expected, _ = start(pair, config, [prompt])
    engine = load_engine(pair, config, "reference", torch.float64)
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
    assert torch.equal(output.draft_input.topk_index, expected.topk_index)
    torch.testing.assert_close(output.draft_input.hidden, expected.hidden, rtol=0, atol=1e-12)


def test_a_resumed_request_goes_on_as_if_it_had_not_stopped():
    """Retraction: everything freed, committed tokens prefilled again, the known bonus token kept as root."""
    engine, batch, draft_input, pools = start(agreeing_pair("eagle3"), TREE, [PROMPTS[0]])
    for _ in range(3):
        _, output, draft_input = engine.round(batch, draft_input, pools)
        batch = batch.after(output.num_accepted_tokens)
    _, expected, _ = engine.round(batch, draft_input, pools)
    row, length = int(batch.req_pool_indices[0]), int(batch.seq_lens[0])
    committed, bonus = pools.token_ids[row, :length].clone(), draft_input.bonus_tokens.long()
    pools.close(row)
    again = pools.open()
    pools.reserve(again, length)
    batch = replace(batch, req_pool_indices=torch.tensor([again]))
    prefill = PrefillInput(committed, torch.tensor([0, length]), torch.tensor([0]), bonus)
    _, resumed, _ = engine.round(batch, engine.prefill(batch, prefill, pools).draft_input, pools)
    assert resumed.accepted_tokens() == expected.accepted_tokens()
    torch.testing.assert_close(resumed.target_logits, expected.target_logits, rtol=0, atol=1e-10)


def test_release_round_owns_the_committed_pages_between_rounds():
    engine, batch, draft_input, pools = start(agreeing_pair("eagle3"), replace(TREE, release="round"))
    for _ in range(4):
        _, output, draft_input = engine.round(batch, draft_input, pools)
        batch = batch.after(output.num_accepted_tokens)
        owned = [pools.owned_columns(row) for row in batch.req_pool_indices.tolist()]
        assert owned == [-(-length // 4) * 4 for length in batch.seq_lens.tolist()]
        pools.audit()


def test_release_finish_never_shrinks():
    engine, batch, draft_input, pools = start(agreeing_pair("eagle3"), TREE)
    before = [0] * batch.size
    for _ in range(4):
        _, output, draft_input = engine.round(batch, draft_input, pools)
        owned = [pools.owned_columns(row) for row in batch.req_pool_indices.tolist()]
        assert owned == [TREE.reserved_columns(length) for length in batch.seq_lens.tolist()]
        assert all(now >= then for now, then in zip(owned, before, strict=True))
        before, batch = owned, batch.after(output.num_accepted_tokens)


def test_states_are_not_changed_by_the_phases_that_read_them():
    engine, batch, draft_input, pools = start(agreeing_pair("eagle3"), TREE)
    kept = {f.name: getattr(draft_input, f.name).clone() for f in fields(DraftInput)}
    _, output, _ = engine.round(batch, draft_input, pools)
    assert all(torch.equal(kept[name], getattr(draft_input, name)) for name in kept)
    assert torch.equal(output.num_accepted_drafts + 1, output.num_accepted_tokens)
    assert output.accept_index.shape == (batch.size, TREE.num_steps + 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(TREE, max_len=513), "max_len is 513; allowed: at most the target's max_position_embeddings, 512"),
        (SpecConfig(topk=43, num_steps=2, num_draft_tokens=8), "topk is 43; allowed: at most the draft vocabulary, 42"),
    ],
)
def test_a_setting_that_does_not_fit_the_pair_is_refused(config, message):
    with pytest.raises(InputError, match=message):
        load_engine(agreeing_pair("eagle3"), config, "reference")


def test_speculation_without_a_drafter_is_refused():
    with pytest.raises(InputError, match="num_steps is 4"):
        load_engine(replace(agreeing_pair("eagle3"), drafter=None), TREE, "reference")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_the_agreeing_drafter_is_accepted_about_4_times_in_10(kind, family):
    chain = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
    accepted = generate(agreeing_pair(kind, family), PROMPTS * 3, chain, replace(WARM, max_new_tokens=40)).acceptance
    assert 0.25 < accepted.accepted_by_position[0] < 0.55
