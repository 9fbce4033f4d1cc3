"""Target families."""

from specsim.fast.targets.dense import DenseTarget

FAMILIES = {"llama": DenseTarget, "mistral": DenseTarget, "qwen3": DenseTarget}
