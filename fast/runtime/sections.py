"""Sections of a round, and those that one graph captures."""

from collections.abc import Iterator
from enum import Enum, auto

from specsim.core.config import SpecConfig


class Section(Enum):
    """A part of a round that runs on the device without the host."""

    START = auto()  # copy the prefix's tail into the draft lanes, begin them with the root's children
    STEP = auto()  # one draft step
    DRAFT = auto()  # START and every STEP
    BUILD_TREE = auto()  # choose the best candidates and lay them out as trees
    FORWARD = auto()  # the target's forward over the trees
    VERIFY = auto()  # the walk, the commit of the accepted path
    GATHER = auto()  # the accepted rows, as draft-extend reads them
    EXTEND = auto()  # the drafter's forward over these rows


Sections = tuple[Section, ...]
DRAFT_PHASE: Sections = (Section.DRAFT, Section.BUILD_TREE)
VERIFY_PHASE: Sections = (Section.FORWARD, Section.VERIFY, Section.GATHER)
EXTEND_PHASE: Sections = (Section.EXTEND,)
ROUND: Sections = DRAFT_PHASE + VERIFY_PHASE + EXTEND_PHASE

# By graph mode: the sections that are captured together, where no pages move between them.
RECORDED: dict[str, tuple[Sections, ...]] = {
    "eager": (),
    "step": ((Section.START,), (Section.STEP,), (Section.BUILD_TREE,), VERIFY_PHASE, EXTEND_PHASE),
    "phase": (DRAFT_PHASE, VERIFY_PHASE, EXTEND_PHASE),
    "round": (ROUND,),
}
# Under release `round` the host moves pages after these sections, so graphs end with them.
_BEFORE_PAGES_MOVE = {Section.DRAFT, Section.VERIFY}
_DRAFTING = {Section.START, Section.STEP, Section.DRAFT}


def runs(
    sections: Sections, config: SpecConfig, drafts_on_host: bool = False, verifies_on_host: bool = False
) -> Iterator[Sections]:
    """Split sections where the host moves pages, and around what runs on the host."""
    breaks = _BEFORE_PAGES_MOVE if config.release == "round" else _DRAFTING if drafts_on_host else set()
    if verifies_on_host:
        breaks = breaks | {Section.FORWARD, Section.VERIFY}
    start = 0
    for end, section in enumerate(sections, start=1):
        if end == len(sections) or section in breaks:
            yield sections[start:end]
            start = end


def recorded(
    graph: str, config: SpecConfig, drafts_on_host: bool = False, verifies_on_host: bool = False
) -> list[Sections]:
    """List the sections that each graph of a mode captures.

    A section on the host is not captured. Nor is an empty graph, such as that of plain decoding's draft loop, as
    CUDA warns of it.
    """
    left_out = {(section,) for section in _DRAFTING} if config.is_plain or drafts_on_host else set()
    left_out |= {(Section.VERIFY,)} if verifies_on_host else set()
    captured = RECORDED[graph]
    split = (run for sections in captured for run in runs(sections, config, drafts_on_host, verifies_on_host))
    return [run for run in split if run not in left_out]
