"""Pages and pictures that commands write."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.core.errors import InputError

if TYPE_CHECKING:
    from specsim.core.pair import Pair
    from specsim.explorer.recorder import Recorder
    from specsim.explorer.rounds import Rounds
    from specsim.serving.serve import Served


MOST_ROUNDS = 64  # of a file


def write_rounds(path: Path, rounds: "Rounds") -> None:
    """Write recorded rounds as a page, completely or not at all."""
    from specsim.explorer.document import document
    from specsim.explorer.explore import TITLE, write_page

    write_page(path, document(rounds), TITLE)


def served_rounds(pair: "Pair", recorder: "Recorder", served: "Served") -> "Rounds":
    """Join the recorded rounds of a server with its requests."""
    from specsim.explorer.rounds import recorded_rounds
    from specsim.serving.outputs import Generation, output_of

    outputs = tuple(map(output_of, served.requests))
    generation = Generation(outputs, served.config, served.seconds, served.synthetic, served.rule)
    return recorded_rounds(pair, generation, [request.request_id for request in served.requests], recorder)


def check_png(path: Path | None) -> None:
    """Raise InputError for a file whose name is that of another kind of picture, or of none, and without matplotlib."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise InputError("plot", str(path), "a file whose name ends in .png")
    try:
        from specsim import plots  # noqa: F401 - to see that it can be imported
    except ImportError as error:
        raise InputError(
            "plot", "a picture", f"nothing without matplotlib; install it: pip install 'specsim[notebooks]' ({error})"
        ) from error


def png(name: str, data: Any) -> bytes:
    """Draw with the function of this name in specsim.plots."""
    from specsim import plots

    drawn, _ = getattr(plots, name)(data)._repr_png_()
    return drawn
