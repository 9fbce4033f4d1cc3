import itertools
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from specsim.core.uniforms import (
    Stream,
    accept_uniforms,
    draft_uniforms,
    lane_accept_uniforms,
    named_uniforms,
    philox,
    seed_bits,
    token_noise,
    words,
)
from specsim.fast.runtime import uniforms as fast
from specsim.fast.runtime.launch import kernel

# Counter, key, output: the known answers of philox4x32-10 in the Random123 distribution (Salmon et al., SC 2011).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# A first word, then the name that draws it with seed 7 and stream ACCEPT; found by running the bijection backwards.
EXTREME_DRAWS = [
    (0x00000000, (2006363158, 4262740462, 8342112, 1187520981), 1),
    (0x000000FF, (3844951995, 1578246744, 5901780, 1970166203), 1),
    (0x00000100, (3312252772, 4108932461, 6933220, 633820874), 1),
    (0xFFFFFEFF, (2722567563, 2607375528, 13271763, 2090983380), 2**24 - 2),
    (0xFFFFFF00, (555710329, 107378549, 16677130, 1674812195), 2**24 - 1),
    (0xFFFFFFFF, (2403542811, 1679758317, 10320016, 1122276331), 2**24 - 1),
]

# The token, position and request id whose noise has these 53 bits with seed 7; found in the same way.
EXTREME_NOISE = [(0, (791181283, 191658986, 3740279792)), (2**53 - 1, (471590633, 92401136, 2458293184))]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FALSE_ALARM = 1e-6

names = st.tuples(
    st.integers(0, 2**32 - 1),  # request id
    st.sampled_from(Stream),
    st.integers(0, 2**32 - 1),  # L
    st.integers(0, 2**24 - 1),  # depth
    st.integers(0, 2**32 - 1),  # index
)


def tensors(values) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


def draw(seed: int, name: tuple) -> tuple[int, ...]:
    return tuple(int(word) for word in words(seed, *name))


def assert_uniform(values: torch.Tensor, num_bins: int):
    """Run Pearson's chi-square on integers 0..num_bins-1.

    A fair source fails with probability FALSE_ALARM.
    """
    counts = np.bincount(values.flatten().numpy(), minlength=num_bins)
    expected = values.numel() / num_bins
    assert len(counts) == num_bins
    assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(FALSE_ALARM, num_bins - 1)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, output):
    assert tuple(int(word) for word in philox(tensors(counter), tensors(key))) == output


def test_philox_of_many_is_philox_of_each():
    counters, keys, outputs = (tensors(zip(*column, strict=True)) for column in zip(*KNOWN_ANSWERS, strict=True))
    assert all(map(torch.equal, philox(counters, keys), outputs))


def test_the_name_of_zeros_has_the_counter_of_zeros():
    assert draw(0, (0, Stream.PREFILL, 0, 0, 0)) == KNOWN_ANSWERS[0][2]


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_seed_keeps_its_bits(seed):
    assert torch.tensor(seed_bits(seed)).numpy().view(np.uint64) == seed


def test_streams_are_distinct():
    assert len(set(Stream)) == len(Stream.__members__)
    assert all(0 <= stream < 256 for stream in Stream)


@pytest.mark.parametrize("seed", [0, 1, -1])
def test_names_that_differ_anywhere_never_share_a_counter(seed):
    """Philox is a bijection of the counter under one key, so equal outputs would be equal counters."""
    far = (0, 1, 2, 255, 256, 2**16, 2**24 - 1)
    wide = (*far, 2**31, 2**32 - 1)
    request, length, depth, index = torch.meshgrid(*map(torch.tensor, (wide, wide, far, wide)), indexing="ij")
    drawn = [torch.stack(words(seed, request, stream, length, depth, index), -1).view(-1, 4) for stream in Stream]
    assert len(torch.cat(drawn).unique(dim=0)) == len(Stream) * len(wide) ** 3 * len(far)


@given(st.integers(-(2**63), 2**63 - 1), names, names)
def test_two_names_share_a_draw_only_if_they_are_one(seed, first, second):
    assert (draw(seed, first) == draw(seed, second)) == (first == second)


@given(names, st.integers(0, 63), st.integers(-(2**63), 2**63 - 1))
def test_every_one_of_the_seeds_64_bits_matters(name, bit, seed):
    flipped = seed ^ (1 << bit) if bit < 63 else seed ^ -(2**63)
    assert draw(seed, name) != draw(flipped, name)


def test_broadcast_draws_are_the_draws_one_by_one():
    seeds, requests, lengths = torch.tensor([[1], [-5]]), torch.tensor([[7], [2**31]]), torch.tensor([[11], [4]])
    depths = torch.arange(3)
    table = named_uniforms(seeds, requests, Stream.ACCEPT, lengths, depths)
    assert table.shape == (2, 3)
    for row, depth in itertools.product(range(2), range(3)):
        name = (int(requests[row]), Stream.ACCEPT, int(lengths[row]), depth)
        assert table[row, depth] == named_uniforms(int(seeds[row]), *name)


def test_uniforms_of_drafts_are_named_by_depth_and_lane():
    seeds, requests, lengths = torch.tensor([1, -5]), torch.tensor([7, 2**31]), torch.tensor([11, 4])
    drawn = draft_uniforms(seeds, requests, lengths, 2, 3)
    for row, lane in itertools.product(range(2), range(3)):
        name = int(requests[row]), Stream.DRAFT, int(lengths[row]), 2, lane
        assert drawn[row, lane] == named_uniforms(int(seeds[row]), *name)


def test_every_draft_of_a_static_tree_has_its_own_uniform():
    names = torch.tensor([3]), torch.tensor([9]), torch.tensor([6])
    tree_uniforms = lane_accept_uniforms(*names, 3, 2)[0, 1:].view(3, 2)
    assert len(tree_uniforms.unique()) == 6
    for depth, lane in itertools.product(range(3), range(2)):
        assert tree_uniforms[depth, lane] == named_uniforms(3, 9, Stream.ACCEPT, 6, depth, lane)
    assert torch.equal(lane_accept_uniforms(*names, 3, 1)[:, 1:], accept_uniforms(*names, 3)[:, :3])


def test_token_noise_is_named_by_the_position_of_its_token():
    seeds, requests = torch.tensor([[3], [4]]), torch.tensor([[1], [2]])
    noise = token_noise(seeds, requests, torch.tensor([[5, 6], [5, 6]]), 7)
    assert noise.shape == (2, 2, 7)
    assert torch.equal(noise[1, 1], token_noise(torch.tensor(4), torch.tensor(2), torch.tensor(6), 7))
    assert len(noise.unique()) == noise.numel()


def test_token_noise_has_the_gumbel_distribution():
    """exp(-exp(-g)) is uniform: chi-square of 50 equal parts over 100,000."""
    noise = token_noise(torch.tensor(1), torch.tensor(0), torch.tensor(9), 100_000)
    assert_uniform(((-(-noise).exp()).exp() * 50).long(), 50)
    assert noise.dtype == torch.float64


def test_extreme_words_give_finite_noise(monkeypatch):
    for word, noise in ((0, -math.log(53 * math.log(2))), (2**32 - 1, 53 * math.log(2))):
        monkeypatch.setattr("specsim.core.uniforms.words", lambda *name, word=word: (torch.full((1,), word),) * 4)
        assert token_noise(torch.tensor(1), torch.tensor(0), torch.tensor(9), 1).item() == pytest.approx(noise)


def test_no_names_draw_no_uniforms():
    none = torch.empty(0, dtype=torch.int64)
    assert named_uniforms(none[:, None], none[:, None], Stream.ACCEPT, none[:, None], torch.arange(4)).shape == (0, 4)


def test_uniforms_leave_their_arguments_alone():
    arguments = [torch.tensor([2**40, -3]), torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6])]
    seeds, requests, lengths, depths = (argument.clone() for argument in arguments)
    named_uniforms(seeds, requests, Stream.FINAL, lengths, depths)
    assert all(map(torch.equal, (seeds, requests, lengths, depths), arguments))


@pytest.mark.parametrize(("word", "name", "uniform"), EXTREME_DRAWS)
def test_extreme_words_give_uniforms_inside_the_bounds(word, name, uniform):
    request, length, depth, index = name
    drawn = named_uniforms(7, request, Stream.ACCEPT, length, depth, index)
    assert draw(7, (request, Stream.ACCEPT, length, depth, index))[0] == word
    assert drawn.dtype == torch.float64
    assert drawn == uniform * 2.0**-24


@pytest.mark.parametrize("stream", Stream)
def test_uniforms_are_uniform_multiples_exact_in_float32(stream):
    """n = 2^17 for each stream over requests, lengths and depths, one byte at a time.

    False alarm 3·10⁻⁶ each.
    """
    requests, lengths, depths = torch.arange(128)[:, None, None], torch.arange(128)[:, None], torch.arange(8)
    drawn = named_uniforms(0, requests, stream, lengths, depths)
    assert torch.equal(drawn.float().double(), drawn)
    assert drawn.min() >= 2.0**-24
    assert drawn.max() <= 1 - 2.0**-24
    ticks = (drawn * 2**24).long()
    assert torch.equal(ticks * 2.0**-24, drawn)
    for shift in (0, 8, 16):
        assert_uniform(ticks >> shift & 255, 256)


@pytest.mark.parametrize("change", ["seed", "request", "stream", "length", "depth", "index"])
def test_neighbouring_names_draw_independently(change):
    """n = 2^16 pairs that differ by one in one part of the name, 16 × 16 cells.

    False alarm 10⁻⁶ each.
    """
    name = dict(seed=torch.arange(256)[:, None], request=torch.arange(256), stream=1, length=9, depth=2, index=0)
    # Seed and request are shifted by a stride, so that a pair's second is not another pair's first.
    step = 256 if change in ("seed", "request") else 1
    first, second = (
        named_uniforms(n["seed"], n["request"], Stream(n["stream"]), n["length"], n["depth"], n["index"])
        for n in (name, name | {change: name[change] + step})
    )
    assert_uniform((first * 16).long() * 16 + (second * 16).long(), 256)


# The fast implementation.


@kernel
def _indexed(names_ptr, out_ptr, stream_id, size, IS_NOISE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < size
    seed = tl.load(names_ptr + offs, mask=mask, other=0)
    request_id = tl.load(names_ptr + size + offs, mask=mask, other=0)
    root_len = tl.load(names_ptr + 2 * size + offs, mask=mask, other=0)
    depth = tl.load(names_ptr + 3 * size + offs, mask=mask, other=0)
    index = tl.load(names_ptr + 4 * size + offs, mask=mask, other=0)
    if IS_NOISE:
        tl.store(out_ptr + offs, fast.token_noise(seed, request_id, root_len, index), mask=mask)
    else:
        tl.store(out_ptr + offs, fast.named_uniform(seed, request_id, stream_id, root_len, depth, index), mask=mask)


def kernel_draws(stream: Stream, named: list[tuple], device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw the uniforms, or in float64 the noise, of (seed, request id, root length, depth, index) in a kernel."""
    names_5M = torch.tensor(named, dtype=torch.int64).T.contiguous().to(device)
    out = torch.empty(len(named), dtype=dtype, device=device)
    block = triton.next_power_of_2(len(named))
    _indexed[(1,)](names_5M, out, int(stream), len(named), IS_NOISE=dtype == torch.float64, BLOCK=block)
    return out.cpu()


def test_a_uniform_in_a_kernel_takes_every_end_of_its_range(device):
    drawn = kernel_draws(Stream.ACCEPT, [(7, *name) for _, name, _ in EXTREME_DRAWS], device)
    assert drawn.dtype == torch.float32
    assert (drawn.double() * 2**24).tolist() == [cell for _, _, cell in EXTREME_DRAWS]


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), names), min_size=1, max_size=40), st.sampled_from(Stream))
@settings(max_examples=15)
def test_a_uniform_in_a_kernel_is_the_uniform_of_its_name(named, stream):
    named = [(seed, request, length, depth, index) for seed, (request, _, length, depth, index) in named]
    seeds, requests, lengths, depths, indices = torch.tensor(named, dtype=torch.int64).T
    expected = named_uniforms(seeds, requests, stream, lengths, depths, indices)
    assert torch.equal(kernel_draws(stream, named, DEVICE).double(), expected)


def kernel_noise(named: list[tuple], device: str) -> torch.Tensor:
    """Draw the Gumbel noise of (seed, request id, position, token) in a kernel."""
    named = [(*name, 0, token) for *name, token in named]
    return kernel_draws(Stream.TOKEN_NOISE, named, device, torch.float64)


def test_noise_in_a_kernel_is_the_noise_of_its_name(device):
    """Budget: two logarithms, each within some roundings of a number below 2⁶."""
    seeds, requests, positions = torch.randint(-(2**63), 2**63 - 1, (3,)), torch.randint(2**32, (3,)), torch.arange(3)
    expected = token_noise(seeds, requests, positions, 100)
    names = zip(seeds.tolist(), requests.tolist(), positions.tolist(), strict=True)
    drawn = kernel_noise([(*name, token) for name in names for token in range(100)], device)
    torch.testing.assert_close(drawn, expected.flatten(), rtol=0, atol=2.0**-44)


def test_noise_in_a_kernel_is_finite_at_both_ends(device):
    for bits, (token, position, request) in EXTREME_NOISE:
        high, low, _, _ = words(7, request, Stream.TOKEN_NOISE, position, 0, token)
        assert int(high << 21 | low >> 11) == bits
        noise = -math.log(-math.log(max(bits, 1) * 2.0**-53))
        assert kernel_noise([(7, request, position, token)], device).item() == pytest.approx(noise)
