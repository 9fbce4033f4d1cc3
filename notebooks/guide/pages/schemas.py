"""Pages of the JSON outputs, from their schemas: every key with its type and description."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from notebooks.guide.pages.docstrings import cell, code_cell, table
from specsim.cli.schema import document
from specsim.core.json_schema import VERSIONS

_HEADINGS = ("key", "type", "description")


def schema_pages() -> dict[str, str]:
    """Write the list of all outputs and a page for each, by path."""
    schemas = {name: document(name) for name in VERSIONS}
    rows = [
        (f"[{schema['title']}](json/{name}.md)", code_cell(schema["$id"]), cell(schema["description"]))
        for name, schema in schemas.items()
    ]
    lines = [*table(("output", "schema", "description"), rows), ""]
    lines += ["```{toctree}", ":hidden:", "", *(f"json/{name}" for name in schemas), "```"]
    pages = {f"json/{name}.md": _page(schema) for name, schema in schemas.items()}
    return pages | {"generated/schemas.md": "\n".join(lines) + "\n"}


def _page(schema: Mapping[str, Any]) -> str:
    lines = [f"# JSON of `{schema['title']}`", "", cell(schema["description"]), "", f"Schema: `{schema['$id']}`", ""]
    return "\n".join([*lines, *table(_HEADINGS, list(_rows(schema, "")))]) + "\n"


def _rows(schema: Mapping[str, Any], key: str) -> Iterator[tuple[str, ...]]:
    """Give a row for each key of a value: a.b if nested, a[].b in arrays, a.* for any key."""
    required = schema.get("required", ())
    for name, part in schema.get("properties", {}).items():
        yield from _value(part, f"{key}.{name}".removeprefix("."), name in required)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _value(schema["additionalProperties"], f"{key}.*".removeprefix("."), True)


def _value(schema: Mapping[str, Any], key: str, is_required: bool) -> Iterator[tuple[str, ...]]:
    text = schema.get("description", "")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        text += f" One of: {', '.join(f'`{json.dumps(choice)}`' for choice in choices)}."
    yield code_cell(key), cell(_type(schema) + ("" if is_required else ", optional")), cell(text)
    yield from _rows(schema, key)
    items = schema.get("items")
    while isinstance(items, dict):
        key += "[]"
        yield from _rows(items, key)
        items = items.get("items")


def _type(schema: Mapping[str, Any]) -> str:
    """Name the type of a value; of an array with the type of its items."""
    types = schema.get("type", "any")
    names = [types] if isinstance(types, str) else types
    items = schema.get("items")
    of = f" of {_type(items)}" if isinstance(items, dict) else ""
    return " or ".join(name + (of if name == "array" else "") for name in names)
