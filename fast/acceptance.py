"""Verifiers by the names of the settings, each in a file of its own.

Greedy requests have a distribution of one token and drafts without one, for which every verifier follows that token.
"""

from collections.abc import Callable

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.fast.verifiers import block, gumbel, multi_round, rejection, target_only, typical
from specsim.fast.verifiers.path import PathTables
from specsim.fast.verifiers.round import Round
from specsim.fast.vocabulary.distribution import Distributions
from specsim.fast.vocabulary.draw import Requests

VERIFIERS: dict[str, Callable[[Round], torch.Tensor | None]] = {
    "target_only": target_only.accept,
    "typical": typical.accept,
    "rejection": rejection.accept,
    "block": block.accept,
    "multi_round": multi_round.accept,
    "gumbel": gumbel.accept,
}


def accept(
    batch: Batch,
    verify_input: VerifyInput,
    distributions: Distributions,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None,
    config: SpecConfig,
    out: Verdict,
    rejected_B: torch.Tensor,
) -> torch.Tensor | None:
    """Write accept_index and num_accepted_drafts; give the bonus tokens i32 [B], None where they are yet to be drawn.

    They are drawn from the distribution of the path's last node then, without its rejected children, the first of
    which is written to rejected_B, -1 where there is none.
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
    return VERIFIERS[config.verifier](given)
