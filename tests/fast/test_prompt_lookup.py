"""Prompt lookup on the device: every request's drafts are those of the reference."""

import random

import pytest
import torch

from specsim.core.token_drafter import NgramConfig, TreeLimits
from specsim.fast.drafters import prompt_lookup as module
from specsim.fast.drafters.prompt_lookup import Lookup, prompt_lookup
from specsim.fast.runtime.launch import INTERPRETED
from specsim.reference.drafters.ngram import Ngram


def expected(tokens: list[int], config: NgramConfig, num_steps: int) -> list[int]:
    return list(Ngram(config).propose(0, tokens, TreeLimits(num_steps, num_steps, 1)).tokens)


def assert_is_the_references(
    texts: list[list[int] | None], columns: int, config: NgramConfig, num_steps: int, device: str, seed: int = 0
) -> list[int]:
    """Compare with the reference, where a text that is None is a padded request, and return the numbers of drafts."""
    rows = random.Random(seed).sample(range(len(texts) + 2), len(texts))
    rows = [-1 if text is None else row for row, text in zip(rows, texts, strict=True)]
    table = torch.full((len(texts) + 2, columns), -1, dtype=torch.int64)
    for row, text in zip(rows, texts, strict=True):
        if text is not None:
            table[row, : len(text)] = torch.tensor(text)
            table[row, len(text) :] = text[-1]  # stale tokens
    num_tokens = torch.tensor([7 if text is None else len(text) for text in texts], dtype=torch.int64)
    out = Lookup.empty(len(texts), num_steps, device)
    indices = torch.tensor(rows, dtype=torch.int64)
    found = prompt_lookup(table.to(device), indices.to(device), num_tokens.to(device), config, num_steps, out=out)
    assert found is out
    assert (out.tokens.dtype, out.num_alive.dtype) == (torch.int64, torch.int32)
    drafts = [[] if text is None else expected(text, config, num_steps) for text in texts]
    assert out.num_alive.tolist() == list(map(len, drafts))
    assert out.tokens.tolist() == [each + [0] * (num_steps - len(each)) for each in drafts]
    return list(map(len, drafts))


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Let a program take several blocks of positions of a short text."""
    monkeypatch.setattr(module, "block_of", lambda count, on_gpu: 8)


@pytest.mark.parametrize("ngrams", [(1, 1), (1, 4), (2, 3), (3, 7)])
@pytest.mark.parametrize("num_steps", [1, 3, 8])
@pytest.mark.parametrize("vocab_size", [1, 2, 5])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_prompt_lookup_is_the_references(
    batch_size, vocab_size, num_steps, ngrams, device, small_blocks, program_order
):
    rng = random.Random(f"{batch_size} {vocab_size} {num_steps} {ngrams}")
    for columns in (1, 7, 8, 9, 41):
        texts = [
            None if rng.random() < 0.2 else [rng.randrange(vocab_size) for _ in range(rng.randint(1, columns))]
            for _ in range(batch_size)
        ]
        assert_is_the_references(texts, columns, NgramConfig(*ngrams), num_steps, device, columns)


def test_matches_lie_in_any_block(device, small_blocks):
    """The earliest of equal matches counts, and a longer one in a later block wins."""
    one_by_one = list(range(10, 30))
    for place in range(18):
        text = [*one_by_one[:place], 1, 2, *one_by_one[place:], 3, 2, 4, 1, 2]
        after = [*one_by_one, 3][place]
        assert expected(text, NgramConfig(), 1) == [after]
        assert assert_is_the_references([text], 40, NgramConfig(), 1, device) == [1]
        assert assert_is_the_references([text], 40, NgramConfig(1, 1), 3, device) == [3]


@pytest.mark.parametrize("length", [2, 9, 10, 11, 17, 18])
def test_match_just_before_the_last_token_is_found(length, device, small_blocks):
    """The position before the last one may be the only one of its block."""
    text = [*range(2, length), 1, 1]
    assert assert_is_the_references([text], length, NgramConfig(), 2, device) == [1]


def test_lookup_of_a_batch_with_padded_requests_only(device):
    assert assert_is_the_references([None, None], 9, NgramConfig(), 3, device) == [0, 0]


def test_lookup_of_no_requests_and_of_no_steps(device):
    assert assert_is_the_references([], 9, NgramConfig(), 3, device) == []
    assert assert_is_the_references([[1, 2, 1], None], 9, NgramConfig(), 0, device) == [0, 0]


def test_lookup_without_buffers_allocates_them(device):
    table = torch.tensor([[5, 6, 5, -1]], dtype=torch.int32, device=device)
    one = torch.tensor([0], device=device)
    found = prompt_lookup(table, one, one + 3, NgramConfig(), 2)
    assert (found.tokens.tolist(), found.num_alive.tolist()) == ([[6, 5]], [2])


def test_lookup_refuses_a_table_with_strides(device):
    one = torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="token_ids has strides"):
        prompt_lookup(torch.zeros(4, 4, dtype=torch.int64, device=device).T, one, one + 3, NgramConfig(), 2)


@pytest.mark.skipif(INTERPRETED, reason="a captured graph needs a GPU")
def test_captured_lookup_reads_what_changes_in_place():
    table = torch.tensor([[5, 6, 5, 7], [1, 2, 3, 4]], device="cuda")
    rows = torch.tensor([0], device="cuda")
    lengths = torch.tensor([3], device="cuda")
    out = prompt_lookup(table, rows, lengths, NgramConfig(), 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prompt_lookup(table, rows, lengths, NgramConfig(), 2, out=out)
    table[1] = torch.tensor([8, 9, 9, 8])
    for row, length, drafts in ((1, 4, [9, 9]), (1, 2, []), (0, 3, [6, 5]), (-1, 3, [])):
        rows.fill_(row)
        lengths.fill_(length)
        graph.replay()
        assert out.tokens[0].tolist() == drafts + [0] * (2 - len(drafts))
        assert out.num_alive.tolist() == [len(drafts)]
