"""Verification over a vocabulary that ranks share: the same verdict, bit for bit, as of whole rows."""

from dataclasses import fields
from functools import partial

import pytest
import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch, Sampling, VerifyInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.fast import verify
from specsim.fast.runtime.peer_memory import without_padding
from specsim.fast.verifiers.shared import SharedRows, best_groups, can_share, needs_all, verify_shared
from specsim.reference.tree import links, visibility

PARENTS = [-1, 0, 0, 1, 1, 2]
CONFIG = SpecConfig(topk=2, num_steps=2, num_draft_tokens=6, page_size=1, max_len=40)
GREEDY, WARM = SamplingParams(), SamplingParams(temperature=1.0)


def _slice(ranks, logits_RV: torch.Tensor) -> torch.Tensor:
    size = logits_RV.shape[1]
    tokens = ranks.part.tokens(size)
    padding = ranks.part.chunk(size) - len(tokens)
    padded = torch.nn.functional.pad(logits_RV[:, tokens.start : tokens.stop], (0, padding))
    return without_padding(ranks, padded, size)


def _batch(params: list[SamplingParams], seed: int, vocab_size: int) -> Batch:
    size = len(params)
    ids = torch.arange(size)
    lens = torch.full((size,), 4)
    lens[-1] = 0  # padding
    rows = torch.where(lens > 0, ids, -1)
    sampling = Sampling.of(params, vocab_size)
    return Batch(ids, rows, lens, ids * 0 + 2, ids + seed, sampling, 0 * ids, torch.full((size,), 4).int())


def _trees(tokens_BN: torch.Tensor) -> VerifyInput:
    size, nodes = tokens_BN.shape
    next_token, next_sibling = (torch.tensor(each).expand(size, -1).clone() for each in links(PARENTS))
    rows = torch.zeros(size * nodes, dtype=torch.int64)
    return VerifyInput(
        draft_tokens=tokens_BN,
        parents=torch.tensor(PARENTS).expand(size, -1).clone(),
        scores=torch.ones(size, nodes),
        positions=rows,
        mask=visibility(PARENTS).expand(size, -1, -1),
        retrieve_index=torch.arange(size * nodes).view(size, nodes),
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        cache_locations=rows,
        proposed_depth=torch.zeros(size, dtype=torch.int32),
    )


def _both(logits_RV, tokens_BN, seed, ranks):
    size = logits_RV.shape[1]
    count = len(tokens_BN)
    batch = _batch([(GREEDY, WARM)[place % 2] for place in range(count)], seed, size)
    pools = KVPool(KVBuffer(KVLayout(1, 1, 1), 8, torch.float32), None, 1, count, 8)
    trees = _trees(tokens_BN)
    whole = verify.verify(batch, trees, logits_RV, CONFIG, pools)
    shared = verify.verify(batch, trees, torch.zeros_like(logits_RV), CONFIG, pools)
    assert can_share(ranks, size, CONFIG)
    verify_shared(ranks, batch, trees, _slice(ranks, logits_RV), CONFIG, pools, size, shared)
    return whole, shared


@pytest.mark.parametrize("vocab_size", [600, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 5])
def test_a_shared_verdict_is_that_of_whole_rows(in_ranks, vocab_size, dtype, seed):
    """Greedy and sampled requests: drafts near the border of slices, ties over it, and peaked and flat rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(9 * 6, vocab_size, generator=generator) * 3).round(decimals=1)
    tokens = torch.randint(vocab_size, (9, 6), generator=generator)
    tokens[:, 1], tokens[:, 2] = 511, 512
    for place in range(0, 9, 3):
        logits[place * 6, [511, 512]] = 15.0
        logits[place * 6 + 1, [3, vocab_size - 1]] = 12.0
    logits[6:12] = 0.25
    answers = in_ranks(partial(_both, logits.to(dtype), tokens, seed))
    accepted = answers[0][0].num_accepted_drafts
    assert accepted.any()
    assert not accepted.all()
    for whole, shared in answers:
        for each in fields(whole):
            assert torch.equal(getattr(whole, each.name), getattr(shared, each.name)), each.name


def _fetched(logits_RV, ranks):
    rows = SharedRows.of(ranks, _slice(ranks, logits_RV), logits_RV.shape[1])
    rows.fetch(torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, -1, 1]))
    return rows.table


def test_only_wanted_groups_are_fetched(in_ranks):
    """A rank has its own slice and the wanted groups; other entries stay as torch.empty left them, NaN under test."""
    logits = torch.randn(3, 600)
    known = torch.zeros(2, 3, 600, dtype=torch.bool)
    known[0, :, :512] = known[1, :, 512:] = True
    known[:, 0, :256] = known[:, 2, 512:] = known[:, 1, 256:512] = True
    for table, is_known in zip(in_ranks(partial(_fetched, logits)), known, strict=True):
        assert torch.equal(table[is_known], logits[is_known])
        assert table[~is_known].isnan().all()


def test_the_first_of_equal_groups_is_the_best():
    maxima = torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 2.0], [-torch.inf] * 3])
    assert best_groups(maxima).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "changes", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}]
)
def test_filters_and_penalties_need_all_logits(changes):
    params = SamplingParams(temperature=1.0, **changes)
    assert needs_all(_batch([WARM, params, GREEDY], 0, 600), 600)
    assert not needs_all(_batch([WARM, GREEDY, GREEDY], 0, 600), 600)
