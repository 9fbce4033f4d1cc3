"""Schemas of dataclasses: types are those of their fields, descriptions the comments at the fields."""

import ast
import inspect
import textwrap
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from specsim.maintain.schemas import document
from specsim.maintain.schemas.document import Schema

_PLAIN = {int: document.whole, float: document.number, str: document.text, bool: document.flag}


def described(kind: type, description: str, *, leave_out: Collection[str] = (), **texts: str | Schema) -> Schema:
    """Make the schema of a dataclass as `asdict` writes it.

    texts: descriptions in place of comments, or schemas, by field. ValueError for a field that nothing describes.
    """
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in leave_out}
    known = comments(kind) | texts
    if missing := [name for name in hints if name not in known]:
        raise ValueError(f"{kind.__name__}.{missing[0]} has neither a comment nor a description")
    if unknown := [name for name in texts if name not in hints]:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]}")
    properties = {name: _field(hint, known[name]) for name, hint in hints.items()}
    return document.record(description, properties)


def comments(kind: type) -> dict[str, str]:
    """Read the comment of each field: at its end, or in the lines above it."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    (body,) = ast.parse("\n".join(lines)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            words = _after(lines, node) or _above(lines, node)
            if words:
                found[node.target.id] = _sentence(words)
    return found


def _after(lines: list[str], node: ast.AnnAssign) -> str:
    """Give the comment at the end of a field's last line."""
    rest = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode()
    return rest.partition("#")[2].strip()


def _above(lines: list[str], node: ast.AnnAssign) -> str:
    """Give the whole lines of comment directly above a field."""
    words = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#"):
            break
        words.insert(0, line.strip().removeprefix("#").strip())
    return " ".join(words)


def _sentence(words: str) -> str:
    first = words[0].upper() if words.split()[0].isalpha() else words[0]
    return f"{first}{words[1:]}" + ("" if words.endswith(".") else ".")


def _field(hint: Any, given: str | Schema) -> Schema:
    """Make the schema of a field; figures described with NaN or infinity are null where they are not finite."""
    if not isinstance(given, str):
        return given
    made = _typed(hint, given)
    is_undefined = any(word in given.lower().replace(",", " ").split() for word in ("nan", "infinite"))
    return document.nullable(made) if made.get("type") == "number" and is_undefined else made


def _typed(hint: Any, description: str) -> Schema:
    origin = get_origin(hint)
    parts = get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint](description)
    if origin is Literal:
        return document.choice(description, *parts)
    if origin in (UnionType, Union):
        return _union(parts, description)
    if origin in (tuple, list) and (parts[1:] in ((), (...,)) or len(set(parts)) == 1):
        length = None if parts[1:] in ((), (...,)) else len(parts)
        return document.array(description, _typed(parts[0], "One entry."), length)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return document.table(description, _typed(parts[1], "One entry."))
    if hint is Any:
        return document.anything(description)
    raise ValueError(f"a schema is needed for {hint} ({description})")


def _union(parts: tuple[Any, ...], description: str) -> Schema:
    """Make the schema of several plain types, or of one type and None."""
    others = [part for part in parts if part is not NoneType]
    schemas = [_typed(part, description) for part in others]
    if len(schemas) == 1:
        made = schemas[0]
    else:
        made = {"type": [schema["type"] for schema in schemas], "description": description}
    return document.nullable(made) if len(others) < len(parts) else made
