"""Coverage of a grid: cases that it has to contain before a run without mismatches means anything."""

from collections.abc import Sequence

from specsim.core.phases import VerifyOutput
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.step import ComparedRequest


def note_round(request: ComparedRequest[VerifyOutput]) -> None:
    """Count the cases that a compared verify phase contains."""
    noted = request.check.tally.coverage
    config = request.config
    length = request.length
    page = config.page_size
    accepted = request.num_accepted_tokens - 1
    noted["rounds"] += 1
    noted[f"accepted {accepted}"] += 1
    noted["rejections"] += accepted < config.num_steps
    noted["dropped rows"] += int((request.step.trees.reference.cache_locations[request.nodes] < 0).sum())
    if page > 1:
        noted["page crossings"] += length // page != request.end // page
        noted["first column of a page"] += length % page == 0
        noted["last column of a page"] += length % page == page - 1


def required(cells: Sequence[Cell], impl: str) -> tuple[str, ...]:
    """List the coverage that these cells have to reach together; only the fast implementation pads batches."""
    deepest = max((cell.config.num_steps for cell in cells), default=0)
    names = ["rounds", *(f"accepted {count}" for count in range(deepest + 1)), "rejections", "page crossings"]
    names += ["first column of a page", "last column of a page", "ties", "dropped rows"]
    if any(cell.drafter and not cell.drafter.has_weights for cell in cells):
        names += ["drafts", "rounds without drafts"]
    return (*names, *(["padded rows"] if impl == "fast" else []))
