"""Links of a page: links to pages of the site stay, and links to other files show their source."""

import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from notebooks.guide.pages.symbols import definitions

SOURCE = "source:"  # scheme of links to source files, which conf.py turns into links to their pages
# A fenced block, an indented line, code within a paragraph, or the target of a link or picture.
_PARTS = re.compile(
    r"^ *(?P<fence>`{3,}|~{3,})[^`\n]*\n.*?^ *(?P=fence)[`~]*[ ]*$|^(?: {4}|\t)[^\n]*$"
    r"|(?<!`)(?P<tick>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=tick)(?!`)"
    r"|(?<=\]\()(?P<target>[^)\s]+)(?=[)\s])",
    re.MULTILINE | re.DOTALL,
)
_EXTERNAL = re.compile(r"#|\w+:")
_PICTURES = (".png", ".svg", ".jpg", ".gif")


@dataclass(frozen=True, slots=True)
class Linker:
    """The files of a repository, and which of them are pages of the site."""

    root: Path
    pages: Mapping[str, str]  # by path of a file from the root, the path of its page in the site's source

    def linked(self, text: str, path: str) -> tuple[str, list[str]]:
        """Give a page of the repository with its links as the site needs them, and the links that lead nowhere."""
        faults: list[str] = []

        def replaced(part: re.Match[str]) -> str:
            target = part["target"]
            if target is None or _EXTERNAL.match(target):
                return part[0]
            try:
                return self.link(target, path)
            except ValueError as error:
                faults.append(f"{target}: {error}")
                return target

        return _PARTS.sub(replaced, text), faults

    def linked_notebook(self, text: str, path: str) -> tuple[str, list[str]]:
        """Give a notebook with the links of its Markdown cells as the site needs them, and those that lead nowhere."""
        notebook = json.loads(text)
        faults: list[str] = []
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                linked, broken = self.linked("".join(cell["source"]), path)
                cell["source"] = linked.splitlines(keepends=True)
                faults += broken
        return json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", faults

    def link(self, target: str, path: str) -> str:
        """Turn a link of a page into one of the site; ValueError if it leads nowhere."""
        location, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), location))
        if file in self.pages:
            here = posixpath.dirname(self.pages[path])
            return posixpath.relpath(self.pages[file], here or ".") + (f"#{anchor}" if anchor else "")
        if file.startswith("..") or not (self.root / file).is_file():
            raise ValueError("no such file")
        if file.endswith(_PICTURES):
            return "/" + file
        if anchor and (not file.endswith(".py") or anchor not in definitions(self.root / file)):
            raise ValueError("no such function, class or constant")
        return SOURCE + file + (f"#{anchor}" if anchor else "")
