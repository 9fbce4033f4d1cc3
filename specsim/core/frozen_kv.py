"""Shape of a drafter on frozen KV, and the target layers whose KV it reads, which reference and fast share."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from specsim.core.drafter import DrafterConfig
from specsim.core.errors import require, require_choice
from specsim.core.target import HeadAttention, ModelConfig


@dataclass(frozen=True, slots=True)
class FrozenKVConfig(DrafterConfig):
    """Layers with queries only, over the target's keys and values (Gemma 4's assistants)."""

    kind: ClassVar[str] = "frozen-kv"
    position: Literal["last", "next"] = "last"  # of every step: L-1, or L

    def __post_init__(self) -> None:
        require_choice("position", self.position, ("last", "next"))

    @property
    def reads(self) -> str:
        """Describe the drafter's inputs."""
        return f"{self.hidden_states}, the target's KV"


def source_layers(config: FrozenKVConfig, target: ModelConfig) -> tuple[int, ...]:
    """List the target layer whose KV each layer of the drafter reads.

    It is the last one with the same kind of attention, sliding or full.
    """
    has_heads = all(isinstance(layer.attention, HeadAttention) for layer in target.layers)
    require(has_heads, "drafter", config.kind, "a drafter with KV of its own: the target's KV is latent vectors")
    sources = []
    for layer in range(config.model.num_layers):
        is_sliding = config.model.window(layer) is not None
        same = [index for index in range(target.num_layers) if (target.window(index) is not None) == is_sliding]
        name = f"attention of the drafter's layer {layer}"
        require(bool(same), name, "sliding" if is_sliding else "full", "of a kind that its target has")
        sources.append(same[-1])
    return tuple(sources)
