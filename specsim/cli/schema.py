"""specsim schema: the JSON Schema of an output, derived from the types and comments of the fields that it has."""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints

from specsim.cli.option_fields import common
from specsim.core.errors import require_choice
from specsim.core.json_schema import VERSIONS, schema_name
from specsim.core.limits import NumberRange

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
_UNDEFINED = re.compile(r"\b(nan|infinite|infinity)\b", re.IGNORECASE)
_NULL = re.compile(r"\b(None|nan|NaN|infinite|infinity)\b")


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """Options of specsim schema."""

    # Command whose output is described, or acceptance (of accept --target), predict-record (of predict --acceptance),
    # simulate-table (of simulate --table), run-compare (of run --compare) or exploration (the data of --html).
    output: Annotated[str | None, common("Output", values="COMMAND", default="list all", is_argument=True)] = None


def schema(options: SchemaOptions) -> None:
    """Print the JSON Schema of a command's --json output.

    Every output names its schema under the key "schema", such as specsim/generate/1. The number is the version.

    Exit status: 0 when done, 2 for bad input.

    Examples:
      specsim schema
      specsim schema generate
    """
    if options.output is not None:
        print(json.dumps(document(options.output), indent=1, ensure_ascii=False))
        return
    from specsim.core.display import print_table, stdout_console

    console = stdout_console()
    print_table(console, ("output", "schema"), [(name, schema_name(name)) for name in VERSIONS])
    console.print("\nspecsim schema COMMAND prints one as JSON Schema, draft 2020-12.", soft_wrap=True)


def document(output: str) -> Schema:
    """Make the JSON Schema of an output; its names: specsim.core.json_schema.VERSIONS."""
    from specsim.cli.formats import FORMATS

    require_choice("command", output, VERSIONS)
    body = type_schema(FORMATS[output])
    version = {"type": "string", "description": "Name and version of this format.", "const": schema_name(output)}
    body["properties"] = {"schema": version} | body["properties"]
    body["required"] = ["schema", *body["required"]]
    return {"$schema": DIALECT, "$id": schema_name(output), "title": f"specsim {output}"} | body


@cache
def comments(owner: type | ModuleType) -> dict[str, str]:
    """Read the comment of each field or constant, and the first line of each property.

    Where a class says that undefined figures are nan, each of its comments says so too. A class that no `class`
    statement makes, as by a call of NamedTuple or in C, has none.
    """
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except OSError:
        return {}
    tree = ast.parse(source)
    definition = tree if isinstance(owner, ModuleType) else tree.body[0]
    assert isinstance(definition, (ast.Module, ast.ClassDef))
    texts: dict[str, str] = {}
    names = [ast.unparse(base) for base in getattr(definition, "bases", ())]  # a TypedDict has no other record of them
    for base in [vars(sys.modules[owner.__module__]).get(name) for name in names] + [*getattr(owner, "__bases__", ())]:
        texts = comments(base) | texts if isinstance(base, type) and hasattr(base, "__annotations__") else texts
    for node in definition.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(target, ast.Name):
            if words := _above(source.splitlines(), node) or _after(source.splitlines(), node):
                texts[target.id] = _sentence(words)
        elif isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            texts[node.name] = _sentence(docstring.partition("\n")[0])
    if _UNDEFINED.search(ast.get_docstring(definition) or "") and isinstance(owner, type):
        texts = {name: text.removesuffix(".") + "; nan where it is undefined." for name, text in texts.items()}
    return texts


def _above(lines: list[str], node: ast.stmt) -> str:
    """Read the lines of comment directly above a field."""
    words = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#"):
            break
        words.insert(0, line.strip().removeprefix("#").strip())
    return " ".join(words)


def _after(lines: list[str], node: ast.stmt) -> str:
    """Read the comment at the end of a field's last line."""
    rest = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset or 0 :].decode()
    return rest.partition("#")[2].strip()


def _sentence(words: str) -> str:
    """Write a comment as a sentence about JSON, which has null for what Python has None, nan and infinity for."""
    first = words[0].upper() if words.split()[0].isalpha() else words[0]
    return f"{first}{words[1:]}" + ("" if words.endswith(".") else ".")


def type_schema(hint: Any, description: str = "") -> Schema:
    """Make the schema of a type; the description of a class without one is the first line of its docstring."""
    origin = get_origin(hint)
    parts = get_args(hint)
    text = {"description": _NULL.sub("null", description)}
    if origin is Annotated and isinstance(parts[1], NumberRange):
        return type_schema(parts[0], description)
    if origin is Annotated:
        return _merged(parts[0], parts[1:], description)
    if origin is Literal:
        return {"type": "string"} | text | {"enum": list(parts)}
    if origin in (UnionType, Union):
        return _union(parts, description)
    if origin in (tuple, list) or hasattr(hint, "_fields"):
        return {"type": "array"} | text | _items(hint, description)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        keys, values = parts
        if get_origin(keys) is Literal:
            return _closed(
                dict.fromkeys(get_args(keys), values), {key: f"{key}." for key in get_args(keys)}, description
            )
        return {"type": "object"} | text | {"additionalProperties": type_schema(values, _entry(values))}
    if hint is Any:
        return text
    if hint in _PLAIN:
        is_nullable = hint is float and _UNDEFINED.search(description)
        return {"type": ["number", "null"] if is_nullable else _PLAIN[hint]} | text
    return _object(hint, [], description)


def _union(parts: tuple[Any, ...], description: str) -> Schema:
    """Make the schema of one of several types; one of them at most is an array or an object."""
    schemas = [type_schema(part, description) for part in parts]
    merged = {name: value for schema in schemas for name, value in schema.items()}
    enum = {"enum": [*merged["enum"], None]} if "enum" in merged and NoneType in parts else {}
    types = [[schema["type"]] if isinstance(schema["type"], str) else schema["type"] for schema in schemas]
    words = next((schema["description"] for schema in schemas if schema["type"] == "object"), merged["description"])
    return merged | {"type": list(dict.fromkeys(chain(*types))), "description": words} | enum


def _entry(hint: Any, words: str = "One entry.") -> str:
    """Word the description of an entry; that of a class is its docstring."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return "" if isinstance(kind, type) and kind not in {*_PLAIN, Any} and not hasattr(kind, "_fields") else words


def _items(hint: Any, description: str) -> Schema:
    """Describe the items of a list or tuple, and their number where a tuple or NamedTuple fixes it."""
    parts = get_args(hint) or tuple(get_type_hints(hint).values())
    words = "One entry; nan where undefined." if _UNDEFINED.search(description) else "One entry."
    if get_origin(hint) is list or parts[1:] == (...,):
        return {"items": type_schema(parts[0], _entry(parts[0], words))}
    kinds = tuple(dict.fromkeys(parts))
    items = type_schema(kinds[0], words) if len(kinds) == 1 else _union(kinds, words)
    return {"items": items, "minItems": len(parts), "maxItems": len(parts)}


def _merged(kind: Any, changes: tuple[Any, ...], description: str) -> Schema:
    """Describe one type with the keys of others; changes: names of fields and properties (formats), and those types."""
    names = [change for change in changes if isinstance(change, str)]
    body = _object(kind, names, description) if isinstance(kind, type) else type_schema(kind, description)
    for added in [type_schema(change) for change in changes if not isinstance(change, str)]:
        body["properties"] |= added["properties"]
        body["required"] = list(dict.fromkeys((*body["required"], *added["required"])))
    return body


def _object(kind: type, names: list[str], description: str) -> Schema:
    """Describe a class, or those of its fields and properties that formats names."""
    hints = get_type_hints(kind, include_extras=True)
    for words in names:
        chosen = words.lstrip("+-").split()
        if words.startswith("-"):
            hints = {name: hint for name, hint in hints.items() if name not in chosen}
            continue
        properties = {name: get_type_hints(vars(kind)[name].fget)["return"] for name in chosen if name not in hints}
        hints = (hints if words.startswith("+") else {name: hints.get(name) for name in chosen}) | properties
    docstring = inspect.getdoc(kind) or ""
    body = _closed(hints, comments(kind), description or docstring.partition("\n")[0])
    if missing := [name for name, part in body["properties"].items() if not part["description"]]:
        raise ValueError(f"{kind.__name__}.{missing[0]} has no comment, which its schema needs")
    return body


def _closed(hints: Mapping[str, Any], texts: Mapping[str, str], description: str) -> Schema:
    """Describe an object with these keys, all required unless NotRequired, and no others."""
    required = [name for name, hint in hints.items() if get_origin(hint) is not NotRequired]
    types = {name: hint if name in required else get_args(hint)[0] for name, hint in hints.items()}
    properties = {name: type_schema(hint, texts.get(name, "")) for name, hint in types.items()}
    keys = {"properties": properties, "required": required, "additionalProperties": False}
    return {"type": "object", "description": _NULL.sub("null", description)} | keys
