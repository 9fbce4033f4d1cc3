"""Situations that a grid has to have met before its silence means something."""

from collections.abc import Sequence

from specsim.core.phases import VerifyInput, VerifyOutput
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.comparison import Trio
from specsim.correctness.differential.scene import Scene


def note_round(scene: Scene, request: int, tree: VerifyInput, outputs: Trio[VerifyOutput]) -> None:
    """Count what a request that was compared went through in a verify phase."""
    noted = scene.tally.exercised
    config = scene.config
    (_, length) = scene.place(request)
    num_nodes = config.num_draft_tokens
    page = config.page_size
    accepted = int(outputs.reference.verdict.num_accepted_drafts[request])
    noted["rounds"] += 1
    noted[f"accepted {accepted}"] += 1
    noted["rejections"] += accepted < config.num_steps
    noted["dropped rows"] += int((tree.cache_locations[request * num_nodes :][:num_nodes] < 0).sum())
    if page > 1:
        noted["page crossings"] += length // page != (length + accepted + 1) // page
        noted["first column of a page"] += length % page == 0
        noted["last column of a page"] += length % page == page - 1


def required(cells: Sequence[Cell], impl: str) -> tuple[str, ...]:
    """List the coverage that these cells owe together, every accepted count up to their deepest tree's included; only
    the fast column pads batches.
    """
    deepest = max((cell.config.num_steps for cell in cells), default=0)
    names = ["rounds", *(f"accepted {count}" for count in range(deepest + 1)), "rejections", "page crossings"]
    names += ["first column of a page", "last column of a page", "ties", "dropped rows"]
    return (*names, *(["padded rows"] if impl == "fast" else []))
