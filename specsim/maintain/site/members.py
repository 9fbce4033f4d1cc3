"""Public members of a module, read from its source: nothing is imported."""

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a class, or a constant of a module."""

    name: str
    annotation: str  # empty if it has none
    value: str  # empty if it has none
    comment: str  # at the end of its lines, else on the lines above it


@dataclass(frozen=True, slots=True)
class Function:
    """A function, method or property."""

    kind: str  # function, method, classmethod, staticmethod or property
    name: str
    signature: str  # with the parentheses and the result; a property's result only
    docstring: str
    decorators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Class:
    """A class with its public members."""

    name: str
    bases: tuple[str, ...]
    signature: str  # of __init__; empty where the fields say it
    docstring: str
    fields: tuple[Field, ...]
    methods: tuple[Function, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A module with its public members."""

    docstring: str
    constants: tuple[Field, ...]
    members: tuple[Function | Class, ...]
    imported: dict[str, str]  # by name, the module that it comes from
    aliases: tuple[Field, ...]  # of types
    type_variables: tuple[str, ...]


def read_module(path: Path, full_names: Mapping[str, str] | None = None) -> Module:
    """Read a file; names in signatures that `full_names` has become the full ones."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    if full_names:
        _Qualifier(full_names).visit(tree)
    comments = _comments(source)
    for_types = [each for node in tree.body if isinstance(node, ast.If) for each in node.body]
    imports = [node for node in (*tree.body, *for_types) if isinstance(node, ast.ImportFrom) and node.module]
    assigned = tuple(_fields(tree.body, comments))
    return Module(
        _docstring(tree),
        tuple(each for each in assigned if each.name.isupper() and not each.name.startswith("_")),
        tuple(_members(tree.body, comments)),
        {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names},
        tuple(each for each in assigned if not each.name.startswith("_") and _is_alias(each)),
        tuple(each.name for each in assigned if each.value.startswith("TypeVar(")),
    )


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """Give a docstring without the indentation of its place: a formula after the first line keeps its own."""
    first, *rest = (ast.get_docstring(node, clean=False) or "").split("\n")
    indent = " " * (0 if isinstance(node, ast.Module) else node.col_offset + 4)
    return "\n".join([first, *(line.removeprefix(indent) for line in rest)]).strip()


def _is_alias(field: Field) -> bool:
    return field.name[0].isupper() and not field.name.isupper() and not field.value.startswith("TypeVar(")


class _Qualifier(ast.NodeTransformer):
    """Replacement of names in the annotations of functions and in aliases of types by full ones."""

    def __init__(self, full_names: Mapping[str, str]) -> None:
        self.full_names = full_names
        self.is_annotation = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        arguments = node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if each is not None:
                each.annotation = self._full(each.annotation)
        node.returns = self._full(node.returns)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():  # an alias of a type
            node.value = self._full(node.value) or node.value
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_name = self.is_annotation and isinstance(node.value, str) and node.value in self.full_names
        return self.visit_Name(ast.Name(str(node.value))) if is_name else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        full = self.full_names.get(node.id) if self.is_annotation else None
        return node if full is None else ast.parse(full, mode="eval").body

    def _full(self, annotation: ast.expr | None) -> ast.expr | None:
        if annotation is None:
            return None
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        self.is_annotation = True
        annotation = self.visit(annotation)
        self.is_annotation = False
        return annotation


class _Comments:
    """Comments of a file by line."""

    def __init__(self, source: str) -> None:
        self.at_end: dict[int, str] = {}
        self.whole: dict[int, str] = {}
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                alone = not token.line[: token.start[1]].strip()
                (self.whole if alone else self.at_end)[token.start[0]] = token.string.lstrip("#").strip()

    def of(self, node: ast.stmt) -> str:
        """Give the comment at the end of a statement's lines, else the lines of comment above it."""
        ends = [self.at_end[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in self.at_end]
        first = node.lineno
        while first - 1 in self.whole:
            first -= 1
        above = [self.whole[line] for line in range(first, node.lineno)]
        return " ".join(text for text in ends or above if not text.startswith(("noqa", "pyright:", "type:")))


_comments = lru_cache(maxsize=None)(_Comments)


def _members(body: Sequence[ast.stmt], comments: _Comments) -> Iterator[Function | Class]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield _function(node, "function")
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield _class(node, comments)


def _class(node: ast.ClassDef, comments: _Comments) -> Class:
    methods: dict[str, Function] = {}
    signature = ""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            signature = _parameters(each, skip_first=True)
        elif isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            methods.setdefault(each.name, _function(each, "method"))
    fields = tuple(each for each in _fields(node.body, comments) if not each.name.startswith("_"))
    bases = tuple(map(ast.unparse, node.bases))
    return Class(node.name, bases, signature, _docstring(node), fields, tuple(methods.values()))


def _fields(body: Sequence[ast.stmt], comments: _Comments) -> Iterator[Field]:
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(targets[0], ast.Name):
            annotation = ast.unparse(node.annotation).strip("'\"") if isinstance(node, ast.AnnAssign) else ""
            value = "" if node.value is None else ast.unparse(node.value)
            yield Field(targets[0].id, annotation, value, comments.of(node))


def _function(node: ast.FunctionDef, kind: str) -> Function:
    decorators = tuple(map(ast.unparse, node.decorator_list))
    names = {text.partition("(")[0].rpartition(".")[2] for text in decorators}
    if kind == "method" and names & {"property", "cached_property"}:
        kind = "property"
    elif kind == "method" and names & {"classmethod", "staticmethod"}:
        kind = "classmethod" if "classmethod" in names else "staticmethod"
    result = "" if node.returns is None else ast.unparse(node.returns).strip("'\"")
    if kind == "property":
        signature = result
    else:
        parameters = _parameters(node, skip_first=kind in ("method", "classmethod"))
        signature = parameters + (f" -> {result}" if result else "")
    return Function(kind, node.name, signature, _docstring(node), decorators)


def _parameters(node: ast.FunctionDef, skip_first: bool) -> str:
    names = node.args
    for group in (names.posonlyargs, names.args):
        if skip_first and group:
            del group[0]
            break
    return f"({ast.unparse(names)})"
