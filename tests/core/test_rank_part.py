"""Slices of ranks: together they are the whole, and each is what its layers read."""

import pytest
import torch

from specsim import InputError
from specsim.core.rank_part import TABLES, RankPart
from specsim.core.target import FAMILIES
from specsim.models.checkpoint.layout import target_layout
from specsim.models.tiny_config import tiny_config


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("vocab_size", [1, 48, 257, 600, 1800, 4096])
def test_slices_of_a_vocabulary_are_the_whole(vocab_size, size):
    """Slices come in order, begin at multiples of one chunk, and of a large vocabulary at multiples of 256."""
    parts = [RankPart(rank, size) for rank in range(size)]
    assert [token for part in parts for token in part.tokens(vocab_size)] == list(range(vocab_size))
    chunk = parts[0].chunk(vocab_size)
    for part in parts:
        tokens = part.tokens(vocab_size)
        assert len(tokens) <= chunk
        assert not tokens or tokens.start == part.rank * chunk
        assert vocab_size < 256 * size or chunk % 256 == 0
        assert vocab_size < 16 * size or chunk % 16 == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_of_tensors_are_the_whole(family):
    has_bias = family in ("llama", "deepseek_v3")
    config = tiny_config(family, vocab_size=51, attention_bias=has_bias, mlp_bias=has_bias)
    whole = {name: torch.randn(shape) for name, shape in target_layout(config).items()}
    parts = [RankPart(rank, 2) for rank in range(2)]
    slices = [part.tensors(whole) for part in parts]
    for name, tensor in whole.items():
        span = parts[0].span(name, tuple(tensor.shape))
        own = [each[name] for each in slices if name in each]
        if span is None:
            assert [each is tensor for each in own] == [True, True]
        else:
            joined = zip(*(each.chunk(span.parts, span.dim) for each in own), strict=True)
            assert torch.equal(torch.cat([part for parts in joined for part in parts], span.dim), tensor)


def test_every_part_of_an_expert_has_a_slice():
    """Only router and norms of a layer with experts are whole on every rank."""
    layout = target_layout(tiny_config("gpt_oss", num_layers=1))
    whole = [name for name, shape in layout.items() if RankPart(1, 2).span(name, shape) is None]
    assert sorted(name.removeprefix("model.layers.0.") for name in whole) == [
        "input_layernorm.weight", "mlp.router.bias", "mlp.router.weight", "model.norm.weight",
        "post_attention_layernorm.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_fit_the_shape_of_a_rank(family):
    """A rank's tensors have the layout of its own shape, but for embedding and head."""
    config = tiny_config(family)
    whole = {name: torch.randn(shape) for name, shape in target_layout(config).items()}
    for rank in range(2):
        part = RankPart(rank, 2)
        layout = target_layout(part.config(config))
        for name, tensor in part.tensors(whole).items():
            assert name in TABLES or tuple(tensor.shape) == layout[name]


@pytest.mark.parametrize(
    ("family", "size", "named"),
    [("llama", 4, "key-value heads"), ("qwen3_moe", 5, "heads"), ("deepseek_v3", 3, "heads"), ("moe", 4, "an expert")],
)
def test_a_model_that_ranks_cannot_share_raises(family, size, named):
    """One of the sizes is no multiple of the number of ranks, and the error names it."""
    moe = family == "moe"
    config = tiny_config("qwen3_moe", num_kv_heads=4, expert={"size": 6}) if moe else tiny_config(family)
    with pytest.raises(InputError, match=named, check=lambda error: error.name == "tensor_parallel"):
        RankPart(0, size).config(config)


def test_a_padded_head_has_zeros_behind_its_tokens():
    part = RankPart(1, 2)
    head = torch.ones(len(part.tokens(51)), 3)
    padded = part.padded(head, 51)
    assert len(padded) == part.chunk(51)
    assert torch.equal(padded[: len(head)], head)
    assert not padded[len(head) :].any()
