from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from specsim.core.config import SamplingParams
from specsim.core.phases import AutoregressiveInput, Batch, DraftExtendInput, DraftInput, Sampling, Verdict

K, H, V = 2, 3, 7


def draft_input(*requests: int) -> DraftInput:
    """Make rows that name their request in every field."""
    ids = torch.tensor(requests, dtype=torch.int64)
    return AutoregressiveInput(
        topk_scores=(ids[:, None] + torch.arange(K) / 10).float(),
        topk_index=10 * ids[:, None] + torch.arange(K),
        hidden=(100 * ids[:, None] + torch.arange(H)).float(),
        bonus_tokens=(1000 * ids).int(),
    )


def sampled_input(*requests: int) -> DraftInput:
    """Make such rows with the distribution of their drafts."""
    draft_prob_BV = torch.tensor(requests).float()[:, None] + torch.arange(V) / 10
    return replace(draft_input(*requests), draft_prob=draft_prob_BV)


def batch(*requests: int) -> Batch:
    ids = torch.tensor(requests, dtype=torch.int64)
    params = [SamplingParams(temperature=request, logit_bias={request % V: 1.0 + request}) for request in requests]
    return Batch(ids, ids + 10, ids + 20, ids + 30, ids + 40, Sampling.of(params, V), ids + 50, ids.int())


def assert_same(actual, expected):
    for field in fields(expected):
        ours, theirs = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(theirs, Sampling):
            assert_same(ours, theirs)
        elif theirs is None:  # biases that no request has
            assert ours is None or not ours.any()
        else:
            assert ours.dtype == theirs.dtype, field.name
            assert torch.equal(ours, theirs), field.name


@pytest.mark.parametrize("make", [draft_input, sampled_input, batch])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [3, 1], [1, 1, 0], []])
def test_filter_takes_rows_by_index_in_the_order_given(make, rows):
    requests = [5, 3, 8, 1]
    kept = make(*requests).filter(torch.tensor(rows, dtype=torch.int64))
    assert_same(kept, make(*(requests[row] for row in rows)))


@pytest.mark.parametrize("make", [draft_input, sampled_input, batch])
def test_filter_twice_is_the_rows_of_the_rows(make):
    kept = make(5, 3, 8, 1).filter(torch.tensor([3, 0, 2])).filter(torch.tensor([2, 0]))
    assert_same(kept, make(8, 1))


@pytest.mark.parametrize("make", [draft_input, sampled_input, batch])
@pytest.mark.parametrize(("first", "second"), [([4], [2, 3]), ([4, 1], []), ([], [2]), ([], [])])
def test_merge_puts_the_others_rows_after_its_own(make, first, second):
    assert_same(make(*first).merge(make(*second)), make(*first, *second))


def test_filter_and_merge_leave_their_arguments_alone():
    state, other = draft_input(1, 2), draft_input(3)
    merged = state.filter(torch.tensor([1])).merge(other)
    merged.topk_index.zero_()
    merged.hidden.zero_()
    assert_same(state, draft_input(1, 2))
    assert_same(other, draft_input(3))


def test_empty_draft_input_is_idle_with_the_types_of_a_live_one():
    empty = AutoregressiveInput.empty(K, H)
    assert_same(empty, draft_input())
    assert empty.draft_prob is None
    assert_same(AutoregressiveInput.empty(K, H, vocab_size=V), sampled_input())
    assert empty.is_idle
    assert not draft_input(0).is_idle


@pytest.mark.parametrize("order", ["idle first", "idle last"])
def test_merging_an_idle_state_changes_nothing(order):
    idle, live = AutoregressiveInput.empty(K, H), draft_input(2, 1)
    assert_same(idle.merge(live) if order == "idle first" else live.merge(idle), live)


@pytest.mark.parametrize("order", ["idle first", "idle last"])
@pytest.mark.parametrize("hidden", [None, torch.empty(0, H)], ids=["absent", "of another type"])
def test_idle_is_recognised_by_its_rows_whatever_its_hidden(order, hidden):
    idle = replace(AutoregressiveInput.empty(K, H), hidden=hidden)
    live = replace(draft_input(2, 1), hidden=draft_input(2, 1).hidden.bfloat16())
    assert_same(idle.merge(live) if order == "idle first" else live.merge(idle), live)


def test_a_drafter_without_hidden_filters_and_merges():
    first, second = (replace(draft_input(request), hidden=None) for request in (1, 2))
    merged = first.merge(second).filter(torch.tensor([1, 0]))
    assert merged.hidden is None
    assert merged.bonus_tokens.tolist() == [2000, 1000]


def test_states_are_frozen():
    for state, name in ((draft_input(1), "hidden"), (batch(1), "seq_lens"), (batch(1).sampling, "top_k")):
        with pytest.raises(FrozenInstanceError):
            setattr(state, name, None)


def test_batch_size_counts_requests():
    assert [batch(*range(count)).size for count in range(3)] == [0, 1, 2]


def test_the_next_round_has_the_accepted_tokens_committed():
    before = batch(5, 3)
    after = before.after(torch.tensor([1, 4], dtype=torch.int32))
    assert after.seq_lens.tolist() == [26, 27]
    assert after.num_rounds.tolist() == [56, 54]
    assert_same(replace(after, seq_lens=before.seq_lens, num_rounds=before.num_rounds), before)


def test_sampling_holds_every_parameter_unrounded():
    first = SamplingParams(temperature=0.1, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.1)
    second = SamplingParams(presence_penalty=-0.3, frequency_penalty=0.7, logit_bias={0: -1.5, 6: 0.1})
    sampling = Sampling.of([first, second], V)
    for name in {field.name for field in fields(Sampling)} - {"is_biased", "logit_bias"}:
        assert getattr(sampling, name).tolist() == [getattr(first, name), getattr(second, name)], name
    assert sampling.logit_bias.tolist() == [[0.0] * V, [-1.5, 0, 0, 0, 0, 0, 0.1]]
    assert sampling.is_biased.tolist() == [False, True]
    assert sampling.top_k.dtype == torch.int64


def test_sampling_of_no_request_has_no_rows():
    sampling = Sampling.of([], V)
    assert sampling.logit_bias is None
    assert {len(getattr(sampling, field.name)) for field in fields(Sampling) if field.name != "logit_bias"} == {0}


def test_biases_exist_only_where_a_request_names_a_token():
    plain, named = Sampling.of([SamplingParams()] * 2, V), Sampling.of([SamplingParams(logit_bias={1: 0.0})], V)
    biased = Sampling.of([SamplingParams(logit_bias={1: 2.0})], V)
    assert plain.logit_bias is None
    assert plain.merge(plain).logit_bias is None
    assert (named.logit_bias.tolist(), named.is_biased.tolist()) == ([[0.0] * V], [False])
    expected = [0.0, 2.0, *[0.0] * (V - 2)]
    for merged, row in ((plain.merge(biased), 2), (biased.merge(plain), 0)):
        assert merged.logit_bias.shape == (3, V)
        assert merged.is_biased.nonzero().tolist() == [[row]]
        assert merged.logit_bias[row].tolist() == expected
        assert float(merged.logit_bias.sum()) == 2.0
        assert merged.filter(torch.tensor([row])).logit_bias.tolist() == [expected]


def extend_input(row_starts: list[int], accepted: list[int]) -> DraftExtendInput:
    others = {field.name: torch.empty(0) for field in fields(DraftExtendInput)}
    counts = torch.tensor(accepted, dtype=torch.int32)
    return DraftExtendInput(**others | dict(row_starts=torch.tensor(row_starts), num_accepted_tokens=counts))


@pytest.mark.parametrize(
    ("row_starts", "accepted", "last"),
    [([0, 4, 8, 12], [1, 4, 2], [0, 7, 9]), ([0, 1, 5, 7], [1, 4, 2], [0, 4, 6]), ([0], [], [])],
    ids=["fixed", "ragged", "idle"],
)
def test_last_row_is_that_of_the_last_accepted_token(row_starts, accepted, last):
    assert extend_input(row_starts, accepted).last_rows.tolist() == last


@pytest.fixture
def verdict():
    """Make a verdict of two requests of four nodes: the first accepts node 2 below the root, the second nothing."""
    return Verdict(
        predict=torch.tensor([11, -1, 12, -1, 13, -1, -1, -1], dtype=torch.int32),
        accept_index=torch.tensor([[0, 2, -1], [4, -1, -1]], dtype=torch.int32),
        num_accepted_drafts=torch.tensor([1, 0], dtype=torch.int32),
        num_accepted_tokens=torch.tensor([2, 1], dtype=torch.int32),
        logprobs=torch.zeros(2, 3),
    )


def test_accepted_tokens_are_read_along_accept_index(verdict):
    assert verdict.accepted_tokens() == [[11, 12], [13]]


def test_accepted_tokens_are_read_in_one_copy(verdict, monkeypatch):
    reads = []
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or to_list(tensor))
    verdict.accepted_tokens()
    assert len(reads) == 1


def test_a_verdict_of_no_request_has_no_tokens(verdict):
    none = replace(verdict, **{field.name: getattr(verdict, field.name)[:0] for field in fields(verdict)})
    assert none.accepted_tokens() == []
