"""Settings and loads of runs, given by the user for files that do not contain them."""

from dataclasses import dataclass, replace

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require_int


@dataclass(frozen=True, slots=True)
class Context:
    """Settings and loads of runs, for files that lack them; None: not given."""

    num_steps: int | None = None
    topk: int = 1
    num_draft_tokens: int | None = None
    batch: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    def config(self, place: str) -> SpecConfig:
        """Make the setting of speculation; InputError names the file that needs it."""
        if self.num_steps is None:
            raise InputError("num_steps", "not given", f"a number, since {place} does not contain it; 0 without drafts")
        require_int("num_steps", self.num_steps, 0)
        if not self.num_steps:
            return SpecConfig.plain()
        nodes = self.num_steps + 1 if self.num_draft_tokens is None else self.num_draft_tokens
        return SpecConfig(self.topk, self.num_steps, nodes)

    def number(self, name: str, place: str) -> int:
        """Give one of the loads; InputError names the file that needs it."""
        value = getattr(self, name)
        if value is None:
            raise InputError(name, "not given", f"a number, since {place} does not contain it")
        return value

    def with_setting(self, num_steps: int | None, topk: int | None = None, nodes: int | None = None) -> "Context":
        """Replace the setting by one that a file contains."""
        if num_steps is None:
            return self
        return replace(self, num_steps=num_steps, topk=topk or 1, num_draft_tokens=nodes)
