"""Target families."""

from specsim.core.errors import InputError
from specsim.core.target import ModelConfig
from specsim.fast.targets.dense import DenseTarget

FAMILIES = {"llama": DenseTarget, "mistral": DenseTarget, "qwen2": DenseTarget, "qwen3": DenseTarget}


def family_of(config: ModelConfig) -> type[DenseTarget]:
    """Find the class of a target, or raise InputError where no kernels run its layers."""
    if config.family not in FAMILIES:
        allowed = f"{', '.join(FAMILIES)} in the fast implementation; the reference runs every family"
        raise InputError("model_type", config.family, allowed)
    return FAMILIES[config.family]
