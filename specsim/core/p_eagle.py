"""The state that a P-EAGLE drafter keeps between rounds, which reference and fast share."""

from dataclasses import dataclass

from specsim.core.mtp import MtpInput


@dataclass(frozen=True, slots=True, repr=False)
class PEagleInput(MtpInput):
    """All drafts of the next round, which one forward made in draft-extend or prefill.

    Drafts of a depth depend on the committed tokens alone, not on the drafts above them. `hidden` is the head's state
    before its final norm, of the root's row at depth 1 and of mask rows at the depths below.
    """
