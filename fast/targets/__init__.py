"""Target families."""

from specsim.core import target
from specsim.fast.targets.decoder import DecoderTarget

FAMILIES: dict[str, type[DecoderTarget]] = dict.fromkeys(target.FAMILIES, DecoderTarget)
