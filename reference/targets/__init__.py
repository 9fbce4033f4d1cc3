"""Target families."""

from specsim.reference.targets.dense import DenseTarget

FAMILIES = {"llama": DenseTarget, "mistral": DenseTarget, "qwen2": DenseTarget, "qwen3": DenseTarget}
