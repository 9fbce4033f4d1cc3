"""Counterexamples: inputs on which an acceptance rule is seen to be wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specsim.correctness.exact.exploration import Box, Interval
from specsim.correctness.exact.model import Distribution, Draw


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A drafted tree and a region of its uniforms."""

    case: str
    draw: Draw
    drafts: str  # of the rule: best, sampled or siblings
    box: Box  # the last interval is that of the final uniform
    result: str  # what the rule does there

    def __str__(self) -> str:
        draw = self.draw
        rows = [f"p after every node {_rows(draw.target_NV)}"]
        rows += [f"q {_rows(draw.draft_NV)}"] if self._has_draft_prob else []
        tree = f"tokens {_listed(['root', *draw.tokens[1:]])}, parents {_listed(draw.parents)}, {', '.join(rows)}"
        return f"on {self.case}, with {tree}, for {self._region()} it {self.result}"

    def _region(self) -> str:
        *uniforms, final = self.box.intervals
        named = [(f"uniforms[{index}]", interval) for index, interval in enumerate(uniforms, self._first)]
        named.append(("final_uniform", final))
        limited = [f"{name} in {_interval(interval)}" for name, interval in named if interval != (0, 1)]
        return ", ".join(limited) or "all uniforms"

    @property
    def _has_draft_prob(self) -> bool:
        return self.drafts != "best"

    @property
    def _first(self) -> int:
        """Index of the first uniform of the box; siblings have one for each node below the root."""
        return int(self.drafts == "siblings")

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write, fractions as texts."""
        *uniforms, final = ([str(end) for end in interval] for interval in self.box.intervals)
        uniforms = uniforms[: self._first] + uniforms
        return {
            "tokens": list(self.draw.tokens),
            "parents": list(self.draw.parents),
            "target_prob": [list(map(str, row)) for row in self.draw.target_NV],
            "draft_prob": [list(map(str, row)) for row in self.draw.draft_NV] if self._has_draft_prob else None,
            "uniforms": uniforms,
            "final_uniform": final,
            "result": self.result,
        }


def _rows(distributions: Sequence[Distribution]) -> str:
    return " ".join(f"({', '.join(map(str, prob_V))})" for prob_V in distributions)


def _listed(values: Sequence[object]) -> str:
    return f"[{', '.join(map(str, values))}]"


def _interval(interval: Interval) -> str:
    return f"({interval[0]}, {interval[1]})"
