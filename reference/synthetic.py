"""How many drafts each request accepts this round where a schedule decides it (specsim.synthetic)."""

from collections.abc import Sequence

import torch

from specsim.phases import Batch
from specsim.synthetic import ONE, SyntheticAcceptance
from specsim.uniforms import Stream, seed_bits, words


def tokens_after(num_rounds: int, shares: Sequence[int], phases: Sequence[int]) -> int:
    """Tokens of a request's first rounds under minimum variance, a bonus in each.

    Of c_0 = r rounds c_i = ⌊c_(i-1) s_i + u_i⌋ accept at least i drafts, where s_i is the share of those that accept
    i - 1 which accept one more, and u_i in [0, 1) a phase of the request's own. As s_i ≤ 1, a round that accepts an
    i-th draft has accepted those before it; over uniform phases c_i is r · s_1 … s_i in the mean, whatever r is.
    """
    count = tokens = num_rounds
    for share, phase in zip(shares, phases, strict=True):
        count = (count * share + phase) // ONE
        tokens += count
    return tokens


def minimum_variance(num_tokens: int, shares: Sequence[int], phases: Sequence[int]) -> int:
    """Drafts that the round after `num_tokens` tokens of decoding accepts.

    Tokens tell which round it is, since each has one at least: nobody has to count rounds, and a request that was
    retracted goes on where it stood.
    """
    num_rounds = 0
    while (after := tokens_after(num_rounds + 1, shares, phases)) <= num_tokens:
        num_rounds += 1
    return after - tokens_after(num_rounds, shares, phases) - 1


def scheduled_drafts(batch: Batch, acceptance: SyntheticAcceptance) -> list[int]:
    """Accepted drafts of each request's round, in [0, S], wherever its tree or its length does not allow less."""
    shares = acceptance.shares
    if acceptance.schedule == "independent":
        coins_B = _words(acceptance, batch.request_ids, batch.seq_lens, 0)
        return [sum(coin < share for share in shares) for coin in coins_B.tolist()]
    phases_BS = _words(acceptance, batch.request_ids[:, None], 0, torch.arange(len(shares)))
    num_tokens_B = batch.seq_lens - batch.prompt_lens
    return [
        minimum_variance(num_tokens, shares, phases)
        for num_tokens, phases in zip(num_tokens_B.tolist(), phases_BS.tolist(), strict=True)
    ]


def _words(acceptance: SyntheticAcceptance, request_ids, root_lens, depths) -> torch.Tensor:
    """Random integers below ONE. No round has a root of length 0, so that phases share no name with coins."""
    return words(seed_bits(acceptance.seed), request_ids, Stream.SYNTHETIC, root_lens, depths)[0] >> 8
