"""The explorer as a Jupyter widget (anywidget), which runs the same program as the page."""

from typing import Any

import anywidget
import traitlets

from specsim.explorer.html import PROGRAM, STYLE


class ExplorerWidget(anywidget.AnyWidget):
    """A widget that draws a document of recorded rounds."""

    _esm = PROGRAM
    _css = STYLE
    exploration = traitlets.Dict().tag(sync=True)


def make_widget(document: dict[str, Any]) -> ExplorerWidget:
    """Make the widget of a document."""
    return ExplorerWidget(exploration=document)
