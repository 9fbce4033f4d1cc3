"""Digests of the code behind a GPU result, for its provenance and for specsim.maintain, which finds stale results."""

import ast
import hashlib
from functools import cache
from pathlib import Path

ENGINE = "specsim.fast.engine"  # imports every kernel of a round
PACKAGE = Path(__file__).resolve().parents[1]
_DIGITS = 12


@cache
def code_digests(module: str = ENGINE) -> dict[str, str]:
    """Digest of a module and of every module of specsim that it imports, lazily too, by name and in order.

    Docstrings, comments and blank lines do not count.
    """
    digests: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source(name)
        if name in digests or path is None:
            continue
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        digests[name] = hashlib.sha256(_code(text, tree).encode()).hexdigest()[:_DIGITS]
        waiting += _imported(tree)
    return dict(sorted(digests.items()))


def _source(name: str) -> Path | None:
    """File of a module; None for what is no module, such as a class."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imported(tree: ast.Module) -> list[str]:
    """Names in specsim that a module imports, each of which may be a module or what is defined in one."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.startswith("specsim.")]


def _code(text: str, tree: ast.Module) -> str:
    """Lines of a module without docstrings, comments of a line of their own, and blank lines."""
    prose: set[int] = set()
    for node in ast.walk(tree):
        can_have = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if can_have and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            prose.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = [line for number, line in enumerate(text.splitlines(), 1) if number not in prose]
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
