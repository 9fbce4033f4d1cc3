"""Pages of the API for sphinx.ext.autodoc: one of each folder, and one of each operation with both implementations."""

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from notebooks.guide.pages.links import SOURCE
from specsim.cli.schema import comments

ROOT = Path(__file__).resolve().parents[3]
IMPLEMENTATIONS = ("reference", "fast")
FOLDERS = ("core", "models", "serving", "correctness", "simulator", "plots", "explorer", "training", "course")
INDEX = "The names that ``import specsim`` gives, each loaded when it is first used, and the folders of the package."
OPERATIONS = "An operation has the same functions in both implementations, with the same arguments."
_CODE = re.compile(r"`([^`\n]+)`")
_MARK_UP = re.compile(r"([\\*_|`])")
_BULLET = re.compile(r"^\s*(?:[-*]|\d+\.) ")


def api_pages(root: Path) -> dict[str, str]:
    """Write every page, by its path in the site's source."""
    packages = {f"specsim.{name}": root / "specsim" / name for name in FOLDERS}
    packages |= {f"specsim.{name}": root / name for name in IMPLEMENTATIONS}
    operations = sorted({path.stem for name in IMPLEMENTATIONS for path in _public(root / name) if path.is_file()})
    pages = {}
    for operation in operations:
        twins = [name for name in IMPLEMENTATIONS if (root / name / f"{operation}.py").is_file()]
        sections = [_section(name.capitalize(), f"specsim.{name}.{operation}") for name in twins]
        pages[f"api/operations/{operation}.rst"] = "\n".join([*_title(operation), *sections])
    for package, folder in packages.items():
        pages |= _folder_pages(package, folder, is_flat=package.split(".")[1] not in IMPLEMENTATIONS)
    table = _exports(root / "specsim" / "__init__.pyi")
    contents = ("operations/index", *FOLDERS, *IMPLEMENTATIONS)
    index = [*_title("Operations of a round"), OPERATIONS, "", *_toctree(operations)]
    pages["api/operations/index.rst"] = "\n".join(index)
    pages["api/index.rst"] = "\n".join([*_title("Python API"), INDEX, "", *table, *_toctree(contents)])
    return pages


def _public(folder: Path) -> list[Path]:
    """List the public modules and packages of a folder."""
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
    return [path for path in paths if not path.stem.startswith(("_", "test_", "conftest"))]


def _exports(file: Path) -> list[str]:
    """Write a table of the names that a package imports from its modules."""
    imports = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    names = [f"   ~{node.module}.{alias.name}" for node in imports for alias in node.names if node.module != "specsim"]
    return [".. autosummary::", "   :nosignatures:", "", *names, ""] if names else []


def _folder_pages(package: str, folder: Path, is_flat: bool = True) -> dict[str, str]:
    """Write the page of a folder, with its modules one after another, and of the folders in it."""
    paths = _public(folder)
    modules = [path.stem for path in paths if path.is_file() and is_flat]
    inner = [path for path in paths if path.is_dir()]
    name = package.split(".")[-1]
    sections = [_section(module, f"{package}.{module}") for module in modules]
    head = [*_title(package), *_exports(folder / "__init__.py"), f".. automodule:: {package}", "   :no-members:", ""]
    lines = [*head, *sections]
    page = "/".join(("api", *package.split(".")[1:]))
    pages = {f"{page}.rst": "\n".join([*lines, *_toctree(f"{name}/{path.stem}" for path in inner)])}
    for path in inner:
        pages |= _folder_pages(f"{package}.{path.stem}", path)
    return pages


def _title(text: str) -> list[str]:
    return [text, "=" * len(text), ""]


def _section(heading: str, module: str) -> str:
    return "\n".join([heading, "-" * len(heading), "", f".. automodule:: {module}", ""])


def _toctree(entries: Iterable[str]) -> list[str]:
    return [".. toctree::", "   :maxdepth: 1", "", *(f"   {entry}" for entry in entries), ""]


def describe(app: object, what: str, name: str, value: Any, options: object, lines: list[str]) -> None:
    """Turn a docstring, which is plain text, into reStructuredText; a field or constant has its comment instead."""
    if what in ("attribute", "data"):
        lines[:] = [comments(_owner(name)).get(name.rpartition(".")[2], "")]
    lines[:] = restructured("\n".join(lines))
    if what == "module":
        file = Path(value.__file__).resolve().relative_to(ROOT).as_posix()
        lines += [f"Source: `{file} <{SOURCE}{file}>`__", ""]


def _owner(name: str) -> type | ModuleType:
    """Find the class or module of a field or constant."""
    parts = name.split(".")
    count = max(count for count in range(len(parts)) if ".".join(parts[:count]) in sys.modules)
    owner: Any = sys.modules[".".join(parts[:count])]
    for part in parts[count:-1]:
        owner = getattr(owner, part)
    return owner


def restructured(text: str) -> list[str]:
    """Escape mark-up outside of backticks, and make code of indented lines."""
    lines: list[str] = []
    is_code = False
    for line in text.splitlines():
        is_indented = line.startswith("    ") and not _in_list(lines)
        if is_indented and not is_code:
            lines += ["", "::", ""]
        if is_code and line and not is_indented:
            lines.append("")
        is_code = is_indented or (is_code and not line)
        is_bullet = bool(_BULLET.match(line))
        if lines and lines[-1] and line and not line.startswith(" ") and is_bullet != _in_list(lines):
            lines.append("")
        lines.append(line if is_code else escaped(line))
    return [*lines, ""]


def _in_list(lines: list[str]) -> bool:
    """Whether the last paragraph is a list."""
    for line in reversed(lines):
        if not line:
            return False
        if _BULLET.match(line):
            return True
    return False


def escaped(line: str) -> str:
    """Escape mark-up of reStructuredText; code between backticks stays."""
    parts = _CODE.split(line)
    return "".join(f"``{part}``" if index % 2 else _MARK_UP.sub(r"\\\1", part) for index, part in enumerate(parts))
