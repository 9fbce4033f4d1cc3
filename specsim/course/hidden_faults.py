"""Faults of notebook 10, known to the reader by a number, and a list of possible causes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from specsim.core.config import SpecConfig
from specsim.core.errors import require

if TYPE_CHECKING:
    from specsim.course.examination import Examination

# Entries of the fault catalogue; the notebook names them only in its solution.
NUMBERED = {1: "drafter-keeps-draft-features", 2: "kv-not-moved", 3: "logprob-after-compaction"}
SUSPECTS = {
    "A": "hidden-without-residual",
    "B": "kv-not-moved",
    "C": "logits-mutated-before-logprob",
    "D": "draft-seq-len-with-rejected",
    "E": "drafter-keeps-draft-features",
    "F": "tail-indices-moved-not-kv",
    "G": "logprob-after-compaction",
    "H": "path-not-compacted",
}
# What the first difference, or the chain, would show if that were the cause.
WOULD_SHOW = {
    "A": "the logits of a second draft forward would be wrong, in the draft phase",
    "B": "target keys would be wrong after verify, in trees only",
    "C": "it needs top-k or top-p, and these runs are greedy; chains would show it too",
    "D": "positions and slots of the next draft forwards would be wrong",
    "E": "draft keys would be wrong after draft-extend",
    "F": "copied tails of the draft KV would be wrong, in the draft phase",
    "G": "log probabilities would be wrong after verify, in trees only",
    "H": "token ids for draft-extend would be wrong after verify",
}
PLACES = {1: ("draft_extend", ("draft keys", "draft values")), 2: ("verify", ("target keys", "target values")),
          3: ("verify", ("logprobs",))}  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Suspects:
    """Possible causes by letter."""

    causes: Mapping[str, str]

    def __repr__(self) -> str:
        return "\n".join(f"{letter}  {cause}" for letter, cause in self.causes.items())

    def _repr_html_(self) -> str:
        rows = (f"<tr><td><b>{letter}</b></td><td>{escape(cause)}</td></tr>" for letter, cause in self.causes.items())
        return f"<table style='text-align:left'>{''.join(rows)}</table>"


def suspects() -> Suspects:
    """List causes of known faults by a letter; those of the numbered faults are among them."""
    from specsim.correctness.faults.catalogue import FAULTS

    causes = {fault.name: fault.cause for fault in FAULTS}
    return Suspects({letter: causes[name] for letter, name in SUSPECTS.items()})


def examine(
    faults: list[int | str | None], prompt: str, config: SpecConfig, settings: Mapping[str, Mapping[str, Any]]
) -> dict[int | str | None, "Examination"]:
    """Examine the fast implementation with each of these faults, as specsim.course.examination does.

    A fault is one of the numbers 1 to 3, a name of the catalogue, or None for the package as it is.
    """
    from specsim.course import examination

    for fault in faults:
        allowed = f"{', '.join(map(str, NUMBERED))}, a name of the fault catalogue, or None"
        require(fault is None or isinstance(fault, str) or fault in NUMBERED, "faults", fault, allowed)
    names = [NUMBERED[fault] if isinstance(fault, int) else fault for fault in faults]
    return dict(zip(faults, examination.examine(names, prompt, config, settings), strict=True))


def compared(answer: Callable[[int], tuple[str, str, str]], fault: int) -> dict[str, str]:
    """Compare each part of a diagnosis, without naming the right one."""
    phase, field, cause = (str(part).strip() for part in answer(fault))
    first_phase, first_fields = PLACES[fault]
    letter = cause.upper()
    reason = f"then {WOULD_SHOW[letter]}" if letter in WOULD_SHOW else f"{cause} is no letter of the list"
    return {
        "the phase": "right" if phase.lower().replace("-", "_") == first_phase else "wrong",
        "the field": "right" if field.lower().replace("_", " ") in first_fields else "wrong",
        "the cause": "right" if SUSPECTS.get(letter) == NUMBERED[fault] else f"wrong: {reason}",
    }
