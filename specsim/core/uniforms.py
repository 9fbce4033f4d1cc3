"""Counter-based random numbers, the only source of randomness, addressed by name and not by order.

A draw is named (seed, request id, stream, L of its round's root, depth, index). So a request gets the same numbers
solo, in any batch and after a preemption. The generator is Philox4x32-10 (Salmon et al., SC 2011).
"""

from enum import IntEnum

import torch

from specsim.core.config import SpecConfig

Part = torch.Tensor | int  # of the names of draws; the parts broadcast
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


class Stream(IntEnum):
    """Purpose of a draw, part of its name.

    Different streams never share a number.
    """

    PREFILL = 0
    ACCEPT = 1
    FINAL = 2
    SYNTHETIC = 3
    DRAFT = 4
    TOKEN_NOISE = 5


def seed_bits(seed: int) -> int:
    """Convert an unsigned 64-bit seed to the int64 with the same bits."""
    return seed - 2**64 if seed >= 2**63 else seed


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Compute Philox4x32-10 on int64 tensors of 32-bit words.

    Returns four words of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        high0 = (product0 >> 32) & _LOW
        high1 = (product1 >> 32) & _LOW
        c0 = high1 ^ c1 ^ k0
        c1 = product1 & _LOW
        c2 = high0 ^ c3 ^ k1
        c3 = product0 & _LOW
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def words(
    seeds: Part, request_ids: Part, stream: Stream, root_lens: Part, depths: Part, indices: Part = 0
) -> tuple[torch.Tensor, ...]:
    """Compute four random 32-bit words (int64) for every name.

    Arguments broadcast. The counter is (index, root length, depth · 256 + stream, request id); the key is the two
    halves of the seed. So request ids, root lengths and indices are below 2³² and depths below 2²⁴.
    """
    depth_and_stream = (torch.as_tensor(depths, dtype=torch.int64) << 8) | int(stream)
    seed = torch.as_tensor(seeds, dtype=torch.int64)
    parts = (torch.as_tensor(part, dtype=torch.int64) for part in (indices, root_lens, depth_and_stream, request_ids))
    return philox(tuple(part & _LOW for part in parts), (seed & _LOW, (seed >> 32) & _LOW))


def named_uniforms(
    seeds: Part, request_ids: Part, stream: Stream, root_lens: Part, depths: Part, indices: Part = 0
) -> torch.Tensor:
    """Draw uniforms of 24 bits in [2⁻²⁴, 1 - 2⁻²⁴], float64 (exact in float32 too), of the broadcast shape.

    0 would accept a draft of probability zero (sglang#35771); 1 would run past the end of a CDF (sglang#30822).
    """
    word = words(seeds, request_ids, stream, root_lens, depths, indices)[0]
    return (word >> 8).clamp(min=1).double() * 2.0**-24


def token_noise(
    seeds: torch.Tensor, request_ids: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Draw standard Gumbel noise -log(-log u) for every token at every position, float64 [..., V].

    Names broadcast: the position of the token that the noise chooses, and no round, so that a drafter and its
    target share it. u has 53 bits, in [2⁻⁵³, 1 - 2⁻⁵³]: with 24 bits the noise would end at 16.6 and never draw the
    tail of a large vocabulary.
    """
    token_ids = torch.arange(vocab_size)
    names = seeds[..., None], request_ids[..., None], Stream.TOKEN_NOISE, positions[..., None]
    high, low, _, _ = words(*names, 0, token_ids)
    uniform = ((high << 21) | (low >> 11)).clamp(min=1).double() * 2.0**-53
    return -(-uniform.log()).log()


def accept_uniforms(
    seeds: torch.Tensor, request_ids: torch.Tensor, root_lens: torch.Tensor, num_steps: int
) -> torch.Tensor:
    """Draw the uniforms of the nodes that a round visits, one for each depth, float64 [B, S+1]."""
    depths = torch.arange(num_steps + 1)
    return named_uniforms(seeds[:, None], request_ids[:, None], Stream.ACCEPT, root_lens[:, None], depths)


def final_uniforms(seeds: torch.Tensor, request_ids: torch.Tensor, root_lens: torch.Tensor) -> torch.Tensor:
    """Draw the uniform of a round's bonus token, float64 [B], named with depth 0 wherever the path ends."""
    return named_uniforms(seeds, request_ids, Stream.FINAL, root_lens, 0)


def first_uniforms(seeds: torch.Tensor, request_ids: torch.Tensor, prompt_lens: torch.Tensor) -> torch.Tensor:
    """Draw the uniform of the token after a prompt, float64 [B], whose root is the prompt's last token."""
    return named_uniforms(seeds, request_ids, Stream.PREFILL, prompt_lens - 1, 0)


def draft_uniforms(
    seeds: torch.Tensor, request_ids: torch.Tensor, root_lens: torch.Tensor, depth: int, num_lanes: int
) -> torch.Tensor:
    """Draw the uniforms for the children of the nodes of one depth, one for each lane, float64 [B, K].

    A round's first drafts are drawn in the round before; their name has the length of their own round's root.
    """
    return named_uniforms(
        seeds[:, None], request_ids[:, None], Stream.DRAFT, root_lens[:, None], depth, torch.arange(num_lanes)
    )


def lane_accept_uniforms(
    seeds: torch.Tensor, request_ids: torch.Tensor, root_lens: torch.Tensor, num_steps: int, num_lanes: int
) -> torch.Tensor:
    """Draw the uniforms of a static tree's nodes, named by the parent's depth and lane, float64 [B, N].

    The root's is unused.
    """
    child = torch.arange(-1, num_lanes * num_steps).clamp(min=0)
    depths = child // num_lanes
    lanes = child % num_lanes
    return named_uniforms(seeds[:, None], request_ids[:, None], Stream.ACCEPT, root_lens[:, None], depths, lanes)


def round_uniforms(
    seeds: torch.Tensor, request_ids: torch.Tensor, root_lens: torch.Tensor, config: SpecConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the uniforms of a round, float64: (accept [B, S+1] by depth or [B, N] by node, final [B])."""
    names = seeds, request_ids, root_lens
    if config.verifier_kind.draws == "node":
        return lane_accept_uniforms(*names, config.num_steps, config.topk), final_uniforms(*names)
    return accept_uniforms(*names, config.num_steps), final_uniforms(*names)
