"""The explorer as a Jupyter widget (anywidget), which runs the same program as the page."""

from typing import Any

from specsim.explorer.html import PROGRAM, STYLE


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
