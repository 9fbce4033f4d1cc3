"""Distance of two tokens' logits in float64, and the effect of rounding on it, computed from the weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specsim.core.pair import TargetCheckpoint
from specsim.correctness.explain.finding import ERRORS, AnswerComparison, Noise, verdict_of


@dataclass(frozen=True, slots=True)
class ComparedWeights:
    """A target's weights in two number formats."""

    exact: Any  # config and tensors, f64
    rounded: Any  # config and tensors in dtype
    dtype: torch.dtype  # of the engines' arithmetic

    @classmethod
    def of(cls, target: TargetCheckpoint, dtype: torch.dtype) -> "ComparedWeights":
        """Convert a loaded target to both formats."""
        from specsim.reference.oracle_forward import in_dtype

        return cls(in_dtype(target, torch.float64), in_dtype(target, dtype), dtype)

    def measure(self, token_ids: Sequence[int], tokens: tuple[int, int]) -> tuple[float, Noise]:
        """Measure the difference of two tokens' logits in float64, and the error of a logit in dtype.

        token_ids: the context, prompt included. The error is four times the largest of any logit in a plain forward in
        dtype, because another order of the same sums errs about as much; in float64 it is the assumed one.
        """
        from specsim.reference.oracle_forward import target_forward

        with torch.inference_mode():
            exact, rounded = (
                target_forward(model.config, model.tensors, list(token_ids), ())[0][-1].double()
                for model in (self.exact, self.rounded)
            )
        error = max(4 * float((exact - rounded).abs().max()), ERRORS["float64"])
        name = str(self.dtype).removeprefix("torch.")
        return float(exact[tokens[0]] - exact[tokens[1]]), Noise(error, f"measured: {name} against float64")


def decide(finding: AnswerComparison, exact: float, noise: Noise) -> AnswerComparison:
    """Decide by the exact distance of the two tokens' logits: beyond two errors, one engine is wrong.

    At a near-tie the same noise also has to explain the engines' own log probabilities; otherwise it is a fault.
    """
    is_near = abs(exact) <= 2 * noise.error
    verdict, says = verdict_of(finding, noise)
    if is_near and verdict == "fault":
        return replace(finding, verdict=verdict, says=f"{says} ({noise.source})", exact=exact)
    says = f"in float64 their logits lie {abs(exact):.3g} apart; rounding ({noise.source}) moves them by "
    says += f"{2 * noise.error:.3g} at most" + ("" if is_near else f": {'b' if exact > 0 else 'a'} is wrong")
    return replace(finding, verdict="numerics" if is_near else "fault", says=says, exact=exact)
