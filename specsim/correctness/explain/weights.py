"""How far apart two tokens' logits are in float64, and how far rounding takes them, where the weights are at hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specsim.correctness.explain.finding import ERRORS, Finding, Noise, verdict_of


@dataclass(frozen=True, slots=True)
class Weights:
    """A target in float64 and in the type of the engines' arithmetic."""

    exact: Any
    rounded: Any
    dtype: torch.dtype

    @classmethod
    def of(cls, target, dtype: torch.dtype) -> "Weights":
        """Of a loaded target."""
        from specsim.reference.oracle_forward import in_dtype

        return cls(in_dtype(target, torch.float64), in_dtype(target, dtype), dtype)

    def measure(self, token_ids: Sequence[int], tokens: tuple[int, int]) -> tuple[float, Noise]:
        """(logit of the first token less that of the second, in float64; how far a logit is off in the type).

        token_ids: the context, prompt and all. The error is four times the largest that a plain forward in that type
        makes of any logit here: another order of the same sums errs about as much. In float64 it is what is assumed.
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


def judged(finding: Finding, exact: float, noise: Noise) -> Finding:
    """By the exact distance of the two tokens' logits: at most what two errors come to, or one engine is wrong.

    Of a near-tie the engines' own log probabilities have to be explained by the same noise, or it is a fault as well.
    """
    is_near = abs(exact) <= 2 * noise.error
    verdict, says = verdict_of(finding, noise)
    if is_near and verdict == "fault":
        return replace(finding, verdict=verdict, says=f"{says} ({noise.source})", exact=exact)
    says = f"in float64 their logits lie {abs(exact):.3g} apart; rounding ({noise.source}) moves them by "
    says += f"{2 * noise.error:.3g} at most" + ("" if is_near else f": {'b' if exact > 0 else 'a'} is wrong")
    return replace(finding, verdict="numerics" if is_near else "fault", says=says, exact=exact)
