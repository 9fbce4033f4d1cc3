"""Provenance of a result: versions, time, and digests of code, which find stale GPU results."""

import ast
import hashlib
import platform
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ENGINE = "specsim.fast.engine"  # imports every kernel of a round
PACKAGE = Path(__file__).resolve().parents[1]
PRINTING = {"specsim.core.display", "specsim.core.printed"}  # text for people: no figure depends on it
# Names of code: what they name counts, but another record changes no figure.
RECORDS = {"specsim.core.kinds", "specsim.core.verifiers"}
_DIGITS = 12


@cache
def code_digests(module: str = ENGINE) -> dict[str, str]:
    """Compute the digest of a module and of every specsim module that it imports, lazily too, but not of PRINTING.

    RECORDS name code as MODULE:NAME; of that the modules in the first module's folder are followed. Keys are module
    names in order. Docstrings, comment lines and blank lines do not count.
    """
    digests: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source(name)
        if name in digests or name in PRINTING or path is None:
            continue
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if name in RECORDS:
            waiting += _named(tree, module.rpartition(".")[0])
            continue
        digests[name] = hashlib.sha256(_code(text, tree).encode()).hexdigest()[:_DIGITS]
        waiting += _imported(tree)
    return dict(sorted(digests.items()))


def _source(name: str) -> Path | None:
    """Find the file of a module, None for the name of anything else."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imported(tree: ast.Module) -> list[str]:
    """List the names in specsim that a module imports, each a module or a definition in one."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.startswith("specsim.")]


def _named(tree: ast.Module, folder: str) -> list[str]:
    """List the modules of a folder that texts of the form MODULE:NAME name."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text.partition(":")[0] for text in texts if text.startswith(f"{folder}.") and ":" in text]


def _code(text: str, tree: ast.Module) -> str:
    """Remove docstrings, comment lines and blank lines from a module's text."""
    prose: set[int] = set()
    for node in ast.walk(tree):
        can_have = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if can_have and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            prose.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = [line for number, line in enumerate(text.splitlines(), 1) if number not in prose]
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


PACKAGES = ("specsim", "torch", "triton")


def versions(device: str, only_imported: bool = False) -> dict[str, Any]:
    """Collect the versions of Python and the computing packages, on `cuda` also GPU and code digests.

    only_imported: digests of modules that this process has imported, where no other process computes.
    """
    provenance: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            provenance[package] = version(package)
        except PackageNotFoundError:
            continue
    if device == "cuda":
        code = {name: digest for name, digest in code_digests().items() if not only_imported or name in sys.modules}
        provenance |= {"gpu": torch.cuda.get_device_name(), "code": code}
    return provenance


def now() -> str:
    """Return date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
