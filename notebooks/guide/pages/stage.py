"""The source folder of the site: copies of the repository's pages with their links rewritten, and generated pages."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from notebooks.guide.pages.api import api_pages
from notebooks.guide.pages.commands import command_pages
from notebooks.guide.pages.course import course_pages
from notebooks.guide.pages.gallery import gallery_pages
from notebooks.guide.pages.links import Linker
from notebooks.guide.pages.schemas import schema_pages

GUIDE = "notebooks/guide"
PAGES = (
    f"{GUIDE}/*.md",
    "*.md",
    "notebooks/*.ipynb",
    "papers/**/*.md",
    "fast/measurements/*.md",
    "specsim/**/*.md",
)
# The papers' index lists its notes in a table, which Sphinx does not read.
PAPERS = """
```{toctree}
:hidden:
:glob:

ledger
leaderboard
*/notes
decisions/*
log
```
"""
PICTURES = (f"{GUIDE}/**/*.png", f"{GUIDE}/**/*.svg")


def page_paths(root: Path) -> Mapping[str, str]:
    """Map each page's path in the repository to its path in the site; the guide's pages are at the top."""
    files = [path.relative_to(root).as_posix() for pattern in PAGES for path in sorted(root.glob(pattern))]
    return {file: file.removeprefix(f"{GUIDE}/") for file in files}


def stage(root: Path, source: Path) -> Iterator[tuple[str, str]]:
    """Write the site's source and drop what is no longer part of it; yields (page, fault) for broken links."""
    pages = page_paths(root)
    linker = Linker(root, pages)
    texts: dict[str, str] = {}
    for file, page in pages.items():
        linked = linker.linked_notebook if file.endswith(".ipynb") else linker.linked
        texts[page], faults = linked((root / file).read_text(encoding="utf-8"), file)
        yield from ((page, fault) for fault in faults)
    texts["papers/index.md"] += PAPERS
    texts |= api_pages(root) | command_pages() | schema_pages()
    texts |= gallery_pages() | course_pages(root)
    pictures = {path.relative_to(root).as_posix(): path for pattern in PICTURES for path in root.glob(pattern)}
    for page, text in texts.items():
        write_changed(source / page, text)
    for name, path in pictures.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, source / name)
    current = {source / name for name in (*texts, *pictures)}
    for path in [path for path in source.rglob("*") if path.is_file() and path not in current]:
        path.unlink()


def write_changed(path: Path, text: str) -> None:
    """Write a file unless it holds this text: Sphinx reads only what has changed."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
