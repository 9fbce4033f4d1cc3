"""Penalties and bias that the fast implementation adds to logits, and the requests that get them."""

import itertools
from dataclasses import replace

import pytest
import torch

from specsim.core.config import SamplingParams
from specsim.core.phases import Batch
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.fast.runtime.launch import INTERPRETED
from specsim.fast.vocabulary import penalties as fast
from specsim.reference.sampling import adjust_logits as reference


def make_batch(params: list[SamplingParams], vocab_size: int, rows=None, seq_lens=None, prompt_lens=None) -> Batch:
    every = range(len(params))
    batch = Batch.of(every, rows or every, seq_lens or [3] * len(params), params, vocab_size)
    return replace(batch, prompt_lens=torch.tensor(prompt_lens)) if prompt_lens else batch


def pools_of(token_rows: list[list[int]], width: int, device: str) -> KVPool:
    """Write the tokens of each request.

    All other entries hold no token.
    """
    pools = KVPool(KVBuffer(KVLayout(1, 1, 1), 8, torch.float32, device), None, 1, len(token_rows), width)
    for row, tokens in zip(pools.token_ids, token_rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return pools


PENALISED = dict(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.3)


def adjust(batch: Batch, logits_BV: torch.Tensor, token_rows: list[list[int]], device: str) -> fast.Logits:
    """Adjust logits without a tree, where the rows' context is the requests' tokens."""
    pools = pools_of(token_rows, max(map(len, token_rows)) + 2, device)
    return fast.adjust_logits(batch.to(device), logits_BV.to(device), pools, None, 0)


@pytest.mark.parametrize("vocab_size", [5, 97, 200])
def test_tokens_are_counted_in_their_own_context(vocab_size, device, program_order, monkeypatch):
    """Requests are longer than a tile of columns, with each penalty, in programs of 64 tokens.

    The arithmetic is exact. A frequency of 2⁻⁴ and a presence of 2⁻⁵ show every count of the output, the repetition
    penalty which tokens occur.
    """
    monkeypatch.setattr(fast, "INTERPRETED", False)
    monkeypatch.setattr(fast, "PROGRAMS", 2)
    params = [dict(frequency_penalty=2.0**-4, presence_penalty=2.0**-5), dict(repetition_penalty=2.0)]
    params = [SamplingParams(**params[kind]) for kind in (0, 1, 0, 1)]
    lengths, prompts, rows = [1099, 1025, 3, 40], [17, 1025, 5, 9], torch.randint(vocab_size, (5, 1100)).tolist()
    batch = make_batch(params, vocab_size, [4, 0, 2, 1], lengths, prompts)
    logits_BV = torch.ones(4, vocab_size)
    adjusted_BV = adjust(batch, logits_BV, rows, device).adjusted.cpu()
    for request, (row, length) in enumerate(batch.rows_and_lens):
        context = torch.tensor(rows[row][:length])
        exact = reference(logits_BV[request], context, prompts[request], batch.sampling, request)
        assert torch.equal(adjusted_BV[request].double(), exact)


@pytest.mark.parametrize("levels", [1, 4])
def test_a_nodes_path_is_counted_with_its_requests_tokens(levels, device, program_order):
    """Two requests have one penalty each.

    With one level only the root counts. The arithmetic is exact.
    """
    params = [dict(frequency_penalty=2.0**-4, presence_penalty=2.0**-5), dict(repetition_penalty=2.0)]
    batch = make_batch([SamplingParams(**each) for each in params], 7, [1, 0], [3, 5], [2, 5])
    parents, rows = [-1, 0, 0, 1, 3], torch.randint(7, (2, 6)).tolist()
    tokens_BN, parents_BN = torch.randint(7, (2, 5)), torch.tensor([parents] * 2)
    logits_RV, tree = torch.ones(10, 7, device=device), fast.TreePaths(tokens_BN.to(device), parents_BN.to(device))
    logits = fast.adjust_logits(batch.to(device), logits_RV, pools_of(rows, 8, device), tree, levels)
    adjusted_BNV = logits.adjusted.cpu().view(2, 5, 7)
    for (request, (row, length)), node in itertools.product(enumerate(batch.rows_and_lens), range(5)):
        path = [0] if levels == 1 else [node]
        while path[-1] > 0:
            path.append(parents[path[-1]])
        context = torch.tensor(rows[row][:length] + tokens_BN[request, path].tolist())
        exact = reference(torch.ones(7), context, int(batch.prompt_lens[request]), batch.sampling, request)
        assert torch.equal(adjusted_BNV[request, node].double(), exact)


@pytest.mark.parametrize(("size", "num_rows"), [(0, 0), (1, 1), (1, 6), (3, 6)])
def test_every_request_has_as_many_rows_as_any_other(size, num_rows):
    assert fast.Logits.unchanged(torch.zeros(num_rows, 5), size).rows_per_request == num_rows / max(1, size)


@pytest.mark.parametrize("params", [{}, dict(temperature=1.0, top_k=3), dict(logit_bias={2: 0.0})])
def test_unchanged_logits_are_neither_read_nor_written(params, device):
    batch = make_batch([SamplingParams(**params)] * 3, 5)
    logits = adjust(batch, torch.full((3, 5), torch.nan), [[1, 2, 3]] * 3, device)
    assert logits.changed.tolist() == [0] * 3
    assert logits.adjusted.isnan().all()  # as torch.empty left it
    assert logits.rows_per_request == 1


def test_a_bias_stays_with_its_request_in_a_batch(device):
    params = [SamplingParams(), SamplingParams(logit_bias={1: 2.5, 4: -64.0})]
    logits = adjust(make_batch(params, 5), torch.ones(2, 5), [[1, 2, 3]] * 2, device)
    assert logits.changed.tolist() == [0, 1]
    assert logits.adjusted[1].tolist() == [1.0, 3.5, 1.0, 1.0, -63.0]


def test_a_bias_of_no_request_is_not_read(device):
    """A static buffer keeps an earlier batch's biases where the requests of a later batch have none."""
    batch = make_batch([SamplingParams(frequency_penalty=1.0), SamplingParams(logit_bias={1: 2.5})], 5)
    batch.sampling.logit_bias[0] = 100.0
    logits = adjust(batch, torch.ones(2, 5), [[1, 2, 3]] * 2, device)
    assert logits.adjusted[0].tolist() == [1.0] * 5
    assert logits.adjusted[1].tolist() == [1.0, 3.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_adjusted_logits_are_the_references(dtype, device, program_order):
    """There is no tree, so the rows' context is the requests' tokens.

    Budget: a rounding for each of four operations.
    """
    vocab_size, rows = 83, torch.randint(83, (4, 30)).tolist()
    bias = {int(token): float(value) for token, value in zip(torch.randint(83, (9,)), torch.randn(9), strict=True)}
    params = [SamplingParams(**PENALISED, logit_bias=bias), SamplingParams(), SamplingParams(frequency_penalty=2.0)]
    params.append(SamplingParams(logit_bias={3: 1e308, 4: -1e308, 5: 2.5}))
    batch = make_batch(params, vocab_size, [3, 1, 0, 2], [30, 12, 7, 1], [11, 12, 9, 1])
    logits_BV = 3 * torch.randn(4, vocab_size).to(dtype)
    logits = adjust(batch, logits_BV, rows, device)
    assert logits.changed.tolist() == [1, 0, 1, 1]
    assert torch.equal(logits.raw.cpu(), logits_BV)
    for request, (row, length) in enumerate(batch.rows_and_lens):
        if request == 1:
            continue
        context, prompt = torch.tensor(rows[row][:length]), int(batch.prompt_lens[request])
        exact = reference(logits_BV[request], context, prompt, batch.sampling, request).clamp(-1e18, 1e18)
        scale = logits_BV[request].double().abs() * 1.3 + 2 * length + exact.abs()
        assert ((logits.adjusted[request].cpu() - exact).abs() <= scale * 4 * 2.0**-24).all()


def test_programs_share_out_the_vocabularies_of_changed_requests(device, program_order, monkeypatch):
    """No number of programs changes a bit, nor does one leave a part out or touch another request's row.

    The vocabulary is longer than a block, and neither it nor the parts of all requests divide evenly.
    """
    size, vocab_size = 37, 2**18 + 5000 if INTERPRETED else 9001
    changed = {0, 7, 8, 21, 36}
    params = [SamplingParams(**PENALISED) if each in changed else SamplingParams() for each in range(size)]
    batch = make_batch(params, vocab_size)
    logits_BV = torch.randn(size, vocab_size)
    rows = torch.randint(vocab_size, (size, 3)).tolist()
    found, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(77))
    for programs in (1, 3, 264):
        monkeypatch.setattr(fast, "PROGRAMS", programs)
        found.append(adjust(batch, logits_BV, rows, device))
    for logits in found:
        assert logits.changed.tolist() == [int(each in changed) for each in range(size)]
        assert torch.equal(logits.adjusted, found[0].adjusted)
    for request in range(size):
        row = logits.adjusted[request].cpu()
        if request not in changed:
            assert (row == 77).all()
            continue
        differs = row != logits_BV[request]
        assert sorted(set(rows[request])) == differs.nonzero().flatten().tolist()


@pytest.mark.parametrize("vocab_size", [5, 32, 97])
def test_a_mask_forbids_tokens_of_its_own_row_only(vocab_size, device, program_order, monkeypatch):
    """Requests have three rows each: padded, penalised without a grammar (its bits are another's), unchanged, both."""
    monkeypatch.setattr(fast, "INTERPRETED", False)
    monkeypatch.setattr(fast, "PROGRAMS", 2)
    penalised, plain = SamplingParams(**PENALISED, logit_bias={1: 2.5, 3: 9.0}), SamplingParams()
    params = [plain, penalised, plain, penalised]
    batch = make_batch(params, vocab_size, [-1, 0, 1, 3], [0, 7, 12, 30], [0, 3, 12, 11]).to(device)
    pools = pools_of(torch.randint(vocab_size, (4, 30)).tolist(), 32, device)
    logits_RV, allowed_BNV = torch.randn(12, vocab_size, device=device), torch.rand(4, 3, vocab_size) < 0.5
    allowed = fast.Allowed.empty(4, 3, vocab_size, device)
    allowed.load({0: allowed_BNV[0], 1: allowed_BNV[1]})
    allowed.load({place: allowed_BNV[place] for place in (0, 2, 3)})
    free, masked = (fast.adjust_logits(batch, logits_RV, pools, None, 0, each) for each in (None, allowed))
    assert (free.changed.tolist(), masked.changed.tolist()) == ([-1, 1, 0, 1], [-1, 1, 1, 1])
    before, found = (each.adjusted.cpu().unflatten(0, (4, 3)) for each in (free, masked))
    before[2], allowed_BNV[1] = logits_RV[6:9].cpu(), True
    assert torch.equal(found[1:], before[1:].masked_fill(~allowed_BNV[1:], -torch.inf))
    assert found[0].isnan().all()  # as torch.empty left it


def test_padded_requests_have_no_logits_whatever_they_hold(device):
    batch = make_batch([SamplingParams(**PENALISED)] * 2, 5, [0, -1], [3, 0])
    logits_BV = torch.full((2, 5), torch.nan)
    logits_BV[0] = 1.0
    logits = adjust(batch, logits_BV, [[1, 2, 3]], device)
    assert logits.changed.tolist() == [1, -1]
    assert not logits.adjusted[0].isnan().any()
    assert logits.adjusted[1].isnan().all()


def test_many_rows_of_a_large_vocabulary_fit_in_tiles(device):
    """32 rows of 40,000 logits are more than the 2²⁰ numbers of Triton's largest tile."""
    bias = {0: 2.0, 31: 1.0, 39_999: -3.0}
    batch = make_batch([SamplingParams(logit_bias=bias)], 40_000)
    adjusted_RV = adjust(batch, torch.ones(32, 40_000), [[1, 2, 3]], device).adjusted.cpu()
    expected_V = torch.ones(40_000).index_add(0, torch.tensor([*bias]), torch.tensor([*bias.values()]))
    assert torch.equal(adjusted_RV, expected_V.expand(32, -1))
