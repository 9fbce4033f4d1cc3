"""Definitions of a Python file: functions, classes and constants, with the line of each."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path


@cache
def definitions(path: Path) -> Mapping[str, int]:
    """Give the line of every definition of a file; members of classes are named with dots."""
    return dict(_lines(ast.parse(path.read_text(encoding="utf-8")).body))


def _lines(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield prefix + node.name, first
        if isinstance(node, ast.ClassDef):
            yield from _lines(node.body, f"{prefix}{node.name}.")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from ((prefix + target.id, node.lineno) for target in targets if isinstance(target, ast.Name))
