"""Drafters by the kind their checkpoint names."""

from specsim.reference.drafters.eagle import EagleHead
from specsim.reference.drafters.eagle3 import Eagle3Head

HEADS = {"eagle": EagleHead, "eagle3": Eagle3Head}
