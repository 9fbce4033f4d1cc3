"""Target families."""

from specsim.core import target
from specsim.reference.targets.decoder import DecoderTarget

FAMILIES: dict[str, type[DecoderTarget]] = dict.fromkeys(target.FAMILIES, DecoderTarget)
