"""The setting's verifier on the trees of a batch; core.verifiers names the file of each.

A greedy request has a one-token distribution and drafts without one. For it every verifier accepts that token.
"""

import torch

from specsim.core.config import SpecConfig
from specsim.core.kinds import resolve
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.fast.verifiers.path import PathTables
from specsim.fast.verifiers.round import Round
from specsim.fast.vocabulary.distribution import Distributions
from specsim.fast.vocabulary.draw import Requests


def accept(
    batch: Batch,
    verify_input: VerifyInput,
    distributions: Distributions,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None,
    config: SpecConfig,
    out: Verdict,
    rejected_B: torch.Tensor,
) -> torch.Tensor | None:
    """Write accept_index and num_accepted_drafts, and return the bonus tokens i32 [B], or None.

    None: the bonus is still to be drawn from the distribution of the path's last node without its rejected children.
    The first rejected child is written to rejected_B, -1 where there is none.
    """
    accept_uniforms, final_uniforms = uniforms or (None, None)
    given = Round(
        requests=Requests.of(batch),
        tree=verify_input,
        distributions=distributions,
        config=config,
        accept_uniforms=accept_uniforms,
        final_uniforms=final_uniforms,
        paths=PathTables.of(out),
        rejected_B=rejected_B,
    )
    return resolve(config.verifier_kind.fast)(given)
