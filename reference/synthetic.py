"""How many drafts each request accepts this round where a schedule decides it (specsim.core.synthetic_acceptance)."""

from collections.abc import Sequence

import torch

from specsim.core.phases import Batch
from specsim.core.synthetic_acceptance import ONE, SyntheticAcceptance
from specsim.core.uniforms import Stream, seed_bits, words


def accepting(num_rounds: int, shares: Sequence[int], phases: Sequence[int]) -> list[int]:
    """How many of a request's first rounds accept at least 1, 2, ... drafts under minimum variance.

    Of c_0 = r rounds c_i = ⌊c_(i-1) s_i + u_i⌋ accept at least i drafts, where s_i is the share of those that accept
    i - 1 which accept one more, and u_i in [0, 1) a phase of the request's own. As s_i ≤ 1, a round that accepts an
    i-th draft has accepted those before it; over uniform phases c_i is r · s_1 … s_i in the mean, whatever r is.
    """
    counts = [num_rounds]
    for share, phase in zip(shares, phases, strict=True):
        counts.append((counts[-1] * share + phase) // ONE)
    return counts[1:]


def scheduled_drafts(batch: Batch, acceptance: SyntheticAcceptance) -> list[int]:
    """Accepted drafts of each request's round, in [0, S], wherever its tree or its length does not allow less."""
    shares = acceptance.shares
    if acceptance.schedule == "independent":
        uniforms_B = _words(acceptance, batch.request_ids, batch.seq_lens, 0)
        return [sum(uniform < share for share in shares) for uniform in uniforms_B.tolist()]
    phases_BS = _words(acceptance, batch.request_ids[:, None], 0, torch.arange(len(shares)))
    return [
        sum(accepting(num_rounds + 1, shares, phases)) - sum(accepting(num_rounds, shares, phases))
        for num_rounds, phases in zip(batch.num_rounds.tolist(), phases_BS.tolist(), strict=True)
    ]


def _words(acceptance: SyntheticAcceptance, request_ids, root_lens, depths) -> torch.Tensor:
    """Random integers below ONE. No round has a root of length 0, so that phases share no name with uniforms."""
    return words(seed_bits(acceptance.seed), request_ids, Stream.SYNTHETIC, root_lens, depths)[0] >> 8
