"""Shape of a language model of its own as the drafter."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from specsim.core.drafter import DrafterConfig
from specsim.core.errors import require_choice


@dataclass(frozen=True, slots=True)
class StandaloneConfig(DrafterConfig):
    """A language model that reads token ids only (arXiv 2211.17192)."""

    kind: ClassVar[str] = "standalone"
    # Token p runs at position p, or token p+1 there, without the first token, as sgl-project/sglang.
    rows: Literal["own", "shifted"] = "own"

    def __post_init__(self) -> None:
        require_choice("rows", self.rows, ("own", "shifted"))

    @property
    def reads(self) -> str:
        """Describe the drafter's inputs."""
        return "tokens"
