"""The explorer as one HTML file: document, program and style inlined, and nothing else allowed to run."""

from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from specsim.core.files import write_whole
from specsim.explorer.document import encoded

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
