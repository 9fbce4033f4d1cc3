"""Sphinx's settings for the documentation: `make docs` writes it to build/docs."""

import tomllib
from importlib.util import find_spec
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

import specsim
from notebooks.guide.pages.api import describe
from notebooks.guide.pages.exploration import write_exploration
from notebooks.guide.pages.links import SOURCE
from notebooks.guide.pages.sources import source_html, source_page
from notebooks.guide.pages.stage import stage, write_changed

ROOT = Path(__file__).resolve().parents[2]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
REPOSITORY = URLS.get("Repository")
SHOWN: set[str] = set()  # source files that pages of this build link to

project = "specsim"
author = "The specsim authors"
release = specsim.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["generated"]  # parts that pages include
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_mock_imports = [] if find_spec("triton") else ["triton"]
autodoc_typehints_format = "short"
suppress_warnings = ["ref.python"]  # a name in quotes may be that of several classes
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
highlight_language = "none"
smartquotes = False  # --topk is no dash

myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto", SOURCE.removesuffix(":")]
myst_links_external_new_tab = False
nb_execution_mode = "off"
nb_merge_streams = True

html_theme = "furo"
html_title = f"specsim {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

linkcheck_ignore = [rf"{SOURCE}.*"]


def write_source(app: Sphinx) -> None:
    """Write the pages that Sphinx reads; a link that leads nowhere is a warning."""
    for page, fault in stage(ROOT, Path(app.srcdir)):
        logging.getLogger(__name__).warning("link %s", fault, location=page.removesuffix(".md"))


def link_sources(app: Sphinx, tree: nodes.document, docname: str) -> None:
    """Point links to source files to the pages that show these, and remember which files need one."""
    for node in tree.findall(nodes.reference):
        uri = node.get("refuri", "")
        if uri.startswith(SOURCE):
            file, _, symbol = uri.removeprefix(SOURCE).partition("#")
            SHOWN.add(file)
            page = app.builder.get_relative_uri(docname, source_page(file))
            node["refuri"] = f"{page}#{symbol}" if symbol else page


def describe_pictures(app: Sphinx, tree: nodes.document, docname: str) -> None:
    """Give pictures of notebooks the code that draws them as alternative text; any other needs its own."""
    for node in tree.findall(nodes.image):
        cell = node.parent
        while cell is not None and "cell" not in cell.get("classes", ()):
            cell = cell.parent
        code = cell and next(iter(cell.findall(nodes.literal_block)), None)
        if code:
            node["alt"] = f"Picture drawn by {code.astext().splitlines()[-1]}"
        elif not node.get("alt"):
            logging.getLogger(__name__).warning("picture without alternative text: %s", node["uri"], location=node)


def write_source_pages(app: Sphinx, error: Exception | None) -> None:
    """Write a page for every source file that a page links to, without the theme's navigation."""
    if error is None and app.builder.format == "html":
        for file in SHOWN:
            write_changed(Path(app.outdir) / f"{source_page(file)}.html", source_html(ROOT, file, REPOSITORY))


def write_front_page(app: Sphinx, error: Exception | None) -> None:
    """Record the rounds that the front page shows."""
    if error is None and app.builder.format == "html":
        write_exploration(Path(app.outdir))


def setup(app: Sphinx) -> None:
    """Register the parts of the build that are ours."""
    app.connect("builder-inited", write_source)
    app.connect("autodoc-process-docstring", describe)
    app.connect("doctree-resolved", link_sources)
    app.connect("doctree-resolved", describe_pictures)
    app.connect("build-finished", write_source_pages)
    app.connect("build-finished", write_front_page)
