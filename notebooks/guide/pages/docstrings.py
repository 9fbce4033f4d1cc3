"""Docstrings, which are plain text, as Markdown that shows the same."""

import re

from specsim.maintain import page

_CODE = re.compile(r"(`[^`\n]+`)")
_SPECIAL = re.compile(r"([\\`*_<>\[\]{}#|])")
_BULLET = re.compile(r"^( {0,3})([-*]) ")


def escaped(text: str) -> str:
    """Escape what Markdown would read as mark-up; code between backticks stays."""
    parts = _CODE.split(text)
    return "".join(part if index % 2 else _SPECIAL.sub(r"\\\1", part) for index, part in enumerate(parts))


def markdown(docstring: str) -> str:
    """Turn a cleaned docstring into Markdown: paragraphs, bullets, and indented lines as code."""
    lines: list[str] = []
    is_code = False
    in_list = False
    for line in docstring.splitlines():
        bullet = _BULLET.match(line)
        starts_code = line.startswith("    ") and not in_list
        if starts_code and not is_code and lines and lines[-1]:
            lines.append("")
        is_code = starts_code or (is_code and not line)
        in_list = bool(bullet) or (in_list and line.startswith("  "))
        if bullet:
            lines.append(bullet[0] + escaped(line[bullet.end() :]))
        else:
            lines.append(line if is_code else escaped(line))
    return "\n".join(lines)


def cell(text: str) -> str:
    """Turn a text into the cell of a table."""
    return escaped(" ".join(text.split()))


def code_cell(text: str) -> str:
    """Turn a piece of code into the cell of a table; nothing stays nothing."""
    text = " ".join(text.split()).replace("|", "\\|")
    if not text:
        return ""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Write a table of cells, of a class that the site's style knows."""
    return ["{.generated}", *page.markdown(headings, rows)]
