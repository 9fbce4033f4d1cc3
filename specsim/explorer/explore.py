"""specsim.explore(...): recorded rounds as a page to click through, in Jupyter or as a file."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.core.errors import InputError
from specsim.explorer.document import document
from specsim.explorer.html import page_html, write_page
from specsim.explorer.rounds import Rounds
from specsim.explorer.widget import make_widget

if TYPE_CHECKING:
    from specsim.plots.sheet import Picture

TITLE = "Rounds of speculative decoding"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Exploration:
    """Recorded rounds to click through: a widget in Jupyter, and a page as a file."""

    document: dict[str, Any]  # of schema specsim/exploration/1
    rounds: Rounds

    def html(self) -> str:
        """Make a page that opens from disk without network."""
        return page_html(self.document, TITLE)

    def write_html(self, path: Path | str) -> None:
        """Write the page to a file, completely or not at all."""
        write_page(Path(path), self.document, TITLE, "path")

    def picture(self) -> "Picture":
        """Draw the first round's tree, shown where widgets do not run."""
        return self.rounds[0].tree()

    def __repr__(self) -> str:
        return f"Exploration({len(self.document['rounds'])} rounds; write_html('rounds.html') writes the page)"

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Show the widget, and the picture where widgets do not run."""
        from base64 import b64encode

        shown: dict[str, Any] = {"text/plain": repr(self)}
        described: dict[str, Any] = {}
        with suppress(ImportError):  # no matplotlib
            picture, described["image/png"] = self.picture()._repr_png_()
            shown["image/png"] = b64encode(picture).decode()
        try:
            own = make_widget(self.document)._repr_mimebundle_()
        except ImportError:  # no anywidget
            return shown, described
        widget, metadata = own if isinstance(own, tuple) else (own or {}, {})
        return {**widget, **shown}, {**metadata, **described}


def explore(result: Rounds) -> Exploration:
    """Make the explorer of recorded rounds, all of a trace or a part such as rounds[2:5].

    In Jupyter it shows a widget, if anywidget is installed. Rounds beyond about 2 MB are left out, which the page says.
    """
    if not isinstance(result, Rounds) or not result.rounds:
        allowed = "Rounds with at least one round, as specsim.trace returns them or a slice of them"
        raise InputError("result", type(result).__name__, allowed)
    return Exploration(document(result), result)
