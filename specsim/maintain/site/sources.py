"""Pages that show source files, with an anchor at every definition."""

from html import escape
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from specsim.maintain.site.symbols import definitions

FOLDER = "source"


def source_page(file: str) -> str:
    """Name the page of a file: its path below the folder of sources."""
    return f"{FOLDER}/{file}"


def source_html(root: Path, file: str, repository: str | None) -> str:
    """Give the body of a file's page: a heading, the highlighted text, and a link to the repository if it has a URL."""
    path = root / file
    anchors: dict[int, str] = {}
    if path.suffix == ".py":
        for name, line in definitions(path).items():
            anchors[line] = anchors.get(line, "") + f'<span id="{escape(name)}"></span>'
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    shown = highlight(path.read_text(encoding="utf-8"), lexer, HtmlFormatter(nowrap=True)).splitlines()
    code = "\n".join(anchors.get(number, "") + line for number, line in enumerate(shown, start=1))
    link = "" if repository is None else f'<p><a href="{escape(repository)}/blob/HEAD/{file}">In the repository</a></p>'
    return f'<h1>{escape(file)}</h1>{link}<div class="highlight"><pre>{code}\n</pre></div>'
