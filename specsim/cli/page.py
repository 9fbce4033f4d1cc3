"""Recorded rounds as HTML files of commands."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specsim.core.pair import Pair
    from specsim.explorer.recorder import Recorder
    from specsim.explorer.rounds import Rounds
    from specsim.serving.serve import Served

MOST_ROUNDS = 64  # of a file


def write_rounds(path: Path, rounds: "Rounds") -> None:
    """Write recorded rounds as a page, completely or not at all."""
    from specsim.explorer.document import document
    from specsim.explorer.explore import TITLE
    from specsim.explorer.html import write_page

    write_page(path, document(rounds), TITLE)


def served_rounds(pair: "Pair", recorder: "Recorder", served: "Served") -> "Rounds":
    """Join the recorded rounds of a server with its requests."""
    from specsim.explorer.rounds import recorded_rounds
    from specsim.serving.outputs import Generation, output_of

    outputs = tuple(map(output_of, served.requests))
    generation = Generation(outputs, served.config, served.seconds, served.synthetic, served.rule)
    return recorded_rounds(pair, generation, [request.request_id for request in served.requests], recorder)
