"""Pages that show source files, with an anchor at every definition."""

from html import escape
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from notebooks.guide.pages.symbols import definitions

FOLDER = "source"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{file}</title>
<link rel="stylesheet" href="{top}_static/pygments.css">
<link rel="stylesheet" href="{top}_static/site.css">
</head>
<body class="source" data-theme="auto">
<p><a href="{top}index.html">specsim</a> {link}</p>
<h1>{file}</h1>
<div class="highlight"><pre>{code}
</pre></div>
</body>
</html>
"""


def source_page(file: str) -> str:
    """Name the page of a file: its path below the folder of sources."""
    return f"{FOLDER}/{file}"


def source_html(root: Path, file: str, repository: str | None) -> str:
    """Write the page of a file, which links to the repository if that has a URL."""
    path = root / file
    anchors: dict[int, str] = {}
    if path.suffix == ".py":
        for name, line in definitions(path).items():
            anchors[line] = anchors.get(line, "") + f'<span id="{escape(name)}"></span>'
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    highlighted = highlight(path.read_text(encoding="utf-8"), lexer, HtmlFormatter(nowrap=True)).splitlines()
    code = "\n".join(anchors.get(number, "") + line for number, line in enumerate(highlighted, start=1))
    link = "" if repository is None else f'· <a href="{escape(repository)}/blob/HEAD/{file}">in the repository</a>'
    return _PAGE.format(file=escape(file), top="../" * source_page(file).count("/"), link=link, code=code)
