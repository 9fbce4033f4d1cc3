"""specsim.explore(...): recorded rounds to click through, as a Jupyter widget or as one HTML file."""

from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError
from specsim.core.files import write_whole
from specsim.explorer.document import document, encoded
from specsim.explorer.rounds import Rounds

PROGRAM = Path(__file__).parent / "page" / "explorer.js"
STYLE = Path(__file__).parent / "page" / "explorer.css"
_START = """
const data = JSON.parse(document.getElementById("exploration").textContent);
render({ model: { get: () => data }, el: document.getElementById("explorer") });
if (window.top === window) document.querySelector(".specsim-explorer").focus({ preventScroll: true });
"""
_PAGE_STYLE = (
    "\n:root { color-scheme: light dark; scrollbar-gutter: stable; }\nbody { margin: 0 auto; max-width: 1240px; }\n"
)


def page_html(document: dict[str, Any], title: str) -> str:
    """Make the page of a document, which loads nothing and runs its own program only.

    `<` is escaped in the document, so that no text of a model ends the element around it.
    """
    program = PROGRAM.read_text(encoding="utf-8") + _START
    style = STYLE.read_text(encoding="utf-8") + _PAGE_STYLE
    data = encoded(document).decode().replace("<", "\\u003c")
    sources = f"script-src {_hash(program)}; style-src {_hash(style)}"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main id="explorer"></main>
<noscript>This page draws rounds of speculative decoding with JavaScript, which is off.</noscript>
<script type="application/json" id="exploration">{data}</script>
<script type="module">{program}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def write_page(path: Path, document: dict[str, Any], title: str, name: str = "html") -> None:
    """Write the page completely or not at all.

    Raises InputError with that name where it cannot be written.
    """
    write_whole(path, page_html(document, title).encode(errors="backslashreplace"), name)


def make_widget(document: dict[str, Any]) -> Any:
    """Make the widget that draws a document of recorded rounds.

    Raises ImportError without anywidget.
    """
    import anywidget
    import traitlets

    class ExplorerWidget(anywidget.AnyWidget):
        _esm = PROGRAM
        _css = STYLE
        exploration = traitlets.Dict().tag(sync=True)

    return ExplorerWidget(exploration=document)


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

        bundle: dict[str, Any] = {"text/plain": repr(self)}
        described: dict[str, Any] = {}
        with suppress(ImportError):  # no matplotlib
            picture, described["image/png"] = self.picture()._repr_png_()
            bundle["image/png"] = b64encode(picture).decode()
        try:
            widget_bundle = make_widget(self.document)._repr_mimebundle_()
        except ImportError:  # no anywidget
            return bundle, described
        widget, metadata = widget_bundle if isinstance(widget_bundle, tuple) else (widget_bundle or {}, {})
        return {**widget, **bundle}, {**metadata, **described}


@check_arguments
def explore(result: Rounds) -> Exploration:
    """Make the explorer of recorded rounds, all of a trace or a part such as rounds[2:5].

    In Jupyter it shows a widget, if anywidget is installed. Rounds beyond about 2 MB are left out, which the page says.
    """
    if not isinstance(result, Rounds) or not result.rounds:
        allowed = "Rounds with at least one round, as specsim.trace returns them or a slice of them"
        raise InputError("result", type(result).__name__, allowed)
    return Exploration(document(result), result)
