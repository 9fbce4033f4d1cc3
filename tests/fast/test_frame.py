"""Copies of states to static buffers and back, with padded rows after them."""

from copy import deepcopy
from dataclasses import fields, replace

import pytest
import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import AutoregressiveInput, Batch, DraftInput, State, VerifyInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.fast.drafters import NoDrafter
from specsim.fast.drafting.lanes import Lanes
from specsim.fast.frame import (
    Frame,
    RoundShape,
    padded_batch,
    padded_extend_input,
    padded_verdict,
    padded_verify_input,
)
from specsim.fast.runtime.buffers import load, unload

CONFIG = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5, page_size=4, max_len=64)
VOCAB, HIDDEN, FEATURES = 7, 6, 12


def make_frame(bucket, config=CONFIG) -> Frame:
    pools = KVPool(KVBuffer(KVLayout(1, 1, 2), 64, torch.float32), None, config.page_size, 4, 64)
    draft_input = AutoregressiveInput.zeros(bucket, config.topk, HIDDEN)
    lanes = Lanes.padded(bucket, HIDDEN, config, torch.float32, VOCAB)
    return Frame.of(RoundShape(bucket, config, VOCAB, FEATURES, torch.float32), pools, draft_input, lanes)


def make_plain_frame() -> Frame:
    config, drafter = SpecConfig.plain(page_size=4, max_len=64), NoDrafter(torch.device("cpu"))
    pools = KVPool(KVBuffer(KVLayout(1, 1, 2), 64, torch.float32), None, config.page_size, 4, 64)
    shape = RoundShape(2, config, VOCAB, FEATURES, torch.float32)
    return Frame.of(shape, pools, drafter.zeros(2), drafter.buffers(2))


def tensors(state: State) -> dict[str, torch.Tensor]:
    values = {}
    for each in fields(state):
        value = getattr(state, each.name)
        if isinstance(value, State):
            values |= {f"{each.name}.{name}": tensor for name, tensor in tensors(value).items()}
        elif isinstance(value, torch.Tensor):
            values[each.name] = value
    return values


def assert_equal_states(first: State, second: State) -> None:
    """Compare states, where biases that no request has may be absent."""
    first, second = tensors(first), tensors(second)
    first = {name: value for name, value in first.items() if name in second or value.any()}
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
        assert first[name].dtype == second[name].dtype, name


def make_batch(size: int) -> Batch:
    params = [SamplingParams(temperature=0.5 + i, top_k=i, seed=i, logit_bias={i: 2.0}) for i in range(size)]
    return Batch.of([5 + i for i in range(size)], list(range(size)), [3 + i for i in range(size)], params, VOCAB)


def make_verify_input(size: int) -> VerifyInput:
    n = CONFIG.num_draft_tokens
    numbers = torch.arange(size * n)
    return VerifyInput(
        draft_tokens=numbers.view(-1, n), parents=numbers.view(-1, n) + 1, scores=numbers.view(-1, n).float(),
        positions=numbers + 2, mask=torch.ones(size, n, n, dtype=torch.bool).tril(),
        retrieve_index=numbers.view(-1, n) + 3, retrieve_next_token=numbers.view(-1, n) + 4,
        retrieve_next_sibling=numbers.view(-1, n) + 5, cache_locations=numbers + 6,
        proposed_depth=torch.arange(size, dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, SpecConfig.plain(max_len=64)])
def test_padded_requests_own_nothing(config):
    shape = RoundShape(3, config, vocab_size=7, num_features=12, dtype=torch.float32)
    batch = padded_batch(shape)
    assert batch.req_pool_indices.tolist() == [-1] * 3
    assert batch.seq_lens.tolist() == [0] * 3
    assert (padded_verify_input(shape).cache_locations == -1).all()
    assert (padded_extend_input(shape).cache_locations == -1).all()
    assert padded_verdict(shape).num_accepted_tokens.tolist() == [1] * 3


def test_a_new_frame_holds_padded_requests_only():
    frame = make_frame(4)
    assert (frame.batch.req_pool_indices == -1).all()
    assert not frame.batch.seq_lens.any()
    assert not frame.batch.prompt_lens.any()
    assert (frame.verify_input.cache_locations == -1).all()
    assert (frame.extend_input.cache_locations == -1).all()
    for state in (frame.batch, frame.draft_input, frame.extend_input):
        assert not any(tensor.isnan().any() for tensor in tensors(state).values())
    frame.buffers.check()


def test_a_new_frame_equals_one_loaded_with_an_empty_batch():
    new, used = make_frame(4), make_frame(4)
    for size in (4, 0):
        used.load(make_batch(size), make_draft_input(size))
        load(used.verify_input, make_verify_input(size))
    for name in ("draft_input", "verify_input"):
        assert_equal_states(getattr(new, name), getattr(used, name))


@pytest.mark.parametrize("size", [0, 1, 3, 4])
def test_a_loaded_state_is_unloaded_unchanged(size):
    frame = make_frame(4)
    load(frame.batch, make_batch(4))  # what an earlier, larger batch left
    load(frame.batch, make_batch(size))
    load(frame.verify_input, make_verify_input(4))
    load(frame.verify_input, make_verify_input(size))
    assert_equal_states(unload(frame.batch, size, 4), make_batch(size))
    assert_equal_states(unload(replace(frame.verify_input, candidates=None), size, 4), make_verify_input(size))
    assert (frame.batch.req_pool_indices[size:] == -1).all()
    assert (frame.batch.seq_lens[size:] == 0).all()
    assert (frame.batch.sampling.temperature[size:] == 0).all()
    assert (frame.verify_input.cache_locations[size * CONFIG.num_draft_tokens :] == -1).all()
    assert (frame.verify_input.retrieve_next_token[size:] == -1).all()


def make_draft_input(size: int, first: int = 0) -> DraftInput:
    numbers = torch.arange(first, first + size)
    return AutoregressiveInput(
        topk_scores=numbers[:, None].repeat(1, 2) / 64,
        topk_index=numbers[:, None].repeat(1, 2) + 1,
        hidden=numbers[:, None].repeat(1, HIDDEN).float(),
        bonus_tokens=numbers.int() + 2,
    )


def loaded(frame: Frame, size: int) -> tuple[Batch, DraftInput]:
    return unload(frame.batch, size, frame.bucket), unload(frame.draft_input, size, frame.bucket)


def test_a_state_that_is_loaded_is_not_copied_again():
    frame, batch, draft_input = make_frame(4), make_batch(3), make_draft_input(3)
    frame.load(batch, draft_input)
    frame.batch.prompt_lens.fill_(77)
    frame.draft_input.topk_index.fill_(77)
    frame.load(replace(batch, seq_lens=batch.seq_lens + 2), draft_input)
    assert frame.batch.seq_lens.tolist() == [5, 6, 7, 0]
    assert (frame.batch.prompt_lens == 77).all()
    assert (frame.draft_input.topk_index == 77).all()
    frame.load(deepcopy(batch), replace(draft_input, topk_index=draft_input.topk_index + 0))
    assert_equal_states(loaded(frame, 3)[0], batch)
    assert_equal_states(loaded(frame, 3)[1], draft_input)


def leave(frame: Frame, seq_lens: list[int], first: int) -> None:
    """Write tensors as a round would."""
    load(frame.output.draft_input, make_draft_input(len(seq_lens), first))
    for after in frame.output.progress:
        after.zero_()
        after[: len(seq_lens)] = torch.tensor(seq_lens, dtype=torch.int64)


@pytest.mark.parametrize("size", [0, 1, 3, 4])
def test_a_rounds_output_can_be_loaded_after_other_states(size):
    frame, batch = make_frame(4), make_batch(size)
    frame.load(batch, make_draft_input(size, 50))
    leave(frame, list(range(20, 20 + size)), 5)
    first = frame.advance(batch)
    leave(frame, list(range(30, 30 + size)), 9)
    second = frame.advance(first.batch)
    assert first.batch.seq_lens.tolist() == list(range(20, 20 + size))
    mixed = replace(second.draft_input, topk_scores=first.draft_input.topk_scores)
    for state, draft_input in [
        (second.batch, second.draft_input),
        (batch, second.draft_input),
        (second.batch, second.draft_input),
        (second.batch, mixed),
        (first.batch, first.draft_input),
        (second.batch, first.draft_input),
        (second.batch, second.draft_input),
        (make_batch(4), make_draft_input(4)),
        (second.batch, second.draft_input),
        (batch, mixed),
    ]:
        frame.load(state, draft_input)
        assert_equal_states(loaded(frame, state.size)[0], state)
        assert_equal_states(loaded(frame, state.size)[1], draft_input)
        assert (frame.batch.req_pool_indices[state.size :] == -1).all()
        assert (frame.batch.seq_lens[state.size :] == 0).all()
    frame.buffers.check()


def test_a_copied_round_output_has_its_own_memory():
    frame, batch = make_frame(4), make_batch(2)
    leave(frame, [11, 12], 3)
    left = frame.advance(batch)
    assert_equal_states(left.draft_input, make_draft_input(2, 3))
    assert_equal_states(left.verdict, unload(frame.verdict, 2, 4))
    leave(frame, [0, 0], 8)
    frame.verdict.predict.fill_(5)
    assert left.batch.seq_lens.tolist() == [11, 12]
    assert_equal_states(left.draft_input, make_draft_input(2, 3))
    assert (left.verdict.predict == -1).all()
    assert left.verdict.predict.shape == (2 * CONFIG.num_draft_tokens,)


def test_an_output_state_shares_no_memory_with_the_buffers():
    frame = make_frame(2)
    load(frame.batch, make_batch(2))
    left = unload(frame.batch, 2, 2)
    frame.batch.seq_lens.fill_(99)
    assert left.seq_lens.tolist() == [3, 4]


def test_plain_decoding_has_a_frame_without_drafts():
    frame = make_plain_frame()
    assert frame.draft_input.tensors.keys() == {"bonus_tokens"}
    assert frame.verify_input.mask.shape == (2, 1, 1)
    frame.buffers.check()


def test_plain_decoding_has_one_block_of_candidates_without_root():
    frame = make_plain_frame()
    assert frame.verify_input.candidates.parent_list.tolist() == [[-1], [-1]]
