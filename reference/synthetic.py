"""Drafts that a schedule accepts in each request's round (specsim.core.synthetic_acceptance)."""

from collections.abc import Sequence

import torch

from specsim.core.phases import Batch
from specsim.core.rule import Tree
from specsim.core.synthetic_acceptance import ONE, SyntheticAcceptance
from specsim.core.uniforms import Part, Stream, seed_bits, words


def accepting(num_rounds: int, shares: Sequence[int], phases: Sequence[int]) -> list[int]:
    """Count the rounds that accept at least 1, 2, ... drafts, of a request's first r, under minimum variance.

    c_0 = r, c_i = ⌊c_(i-1) s_i + u_i⌋. s_i is the share of the rounds with i - 1 accepted drafts that accept the i-th,
    u_i in [0, 1) a phase of the request. As s_i ≤ 1, a round that accepts an i-th draft has accepted those before it.
    The mean of c_i over uniform phases is r · s_1 … s_i.
    """
    counts = [num_rounds]
    for share, phase in zip(shares, phases, strict=True):
        counts.append((counts[-1] * share + phase) // ONE)
    return counts[1:]


def scheduled_drafts(batch: Batch, acceptance: SyntheticAcceptance) -> list[int]:
    """Count the drafts that each request's round accepts, in [0, S].

    Its tree or its length may allow fewer.
    """
    shares = acceptance.shares
    if acceptance.schedule == "independent":
        uniforms_B = _words(acceptance, batch.request_ids, batch.seq_lens, 0)
        return [sum(uniform < share for share in shares) for uniform in uniforms_B.tolist()]
    phases_BS = _words(acceptance, batch.request_ids[:, None], 0, torch.arange(len(shares)))
    return [
        sum(accepting(num_rounds + 1, shares, phases)) - sum(accepting(num_rounds, shares, phases))
        for num_rounds, phases in zip(batch.num_rounds.tolist(), phases_BS.tolist(), strict=True)
    ]


def scheduled_path(tree: Tree, num_drafts: int) -> list[int]:
    """Find the path to the first node of a depth, or to the deepest, whatever the target."""
    limit = max(0, min(num_drafts, tree.depth_limit))
    paths = [tree.path(node) for node in range(len(tree.tokens))]
    return max((path for path in paths if len(path) <= limit + 1), key=len)


def _words(acceptance: SyntheticAcceptance, request_ids: Part, root_lens: Part, depths: Part) -> torch.Tensor:
    """Draw integers below ONE.

    No round has a root of length 0, so phases and uniforms never share a name.
    """
    return words(seed_bits(acceptance.seed), request_ids, Stream.SYNTHETIC, root_lens, depths)[0] >> 8
