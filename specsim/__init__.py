"""specsim: understand, prove and plan speculative decoding."""

from specsim.checkpoint import Pair, load
from specsim.config import InputError, SamplingParams, SpecConfig
from specsim.generate import Generation, Output, generate

__all__ = ["Generation", "InputError", "Output", "Pair", "SamplingParams", "SpecConfig", "generate", "load"]
