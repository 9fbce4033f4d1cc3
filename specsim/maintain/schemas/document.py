"""Parts of a JSON Schema document: every value has a type and a description, and objects are closed.

An object either has fixed keys (`record`) or keys that stand for something, such as names of metrics (`table`).
"""

from collections.abc import Collection, Mapping
from typing import Any

Schema = dict[str, Any]


def text(description: str) -> Schema:
    """Describe a string."""
    return _value("string", description)


def whole(description: str) -> Schema:
    """Describe an integer."""
    return _value("integer", description)


def number(description: str) -> Schema:
    """Describe a number."""
    return _value("number", description)


def flag(description: str) -> Schema:
    """Describe a boolean."""
    return _value("boolean", description)


def anything(description: str) -> Schema:
    """Describe a value of any type."""
    return {"description": description}


def choice(description: str, *values: str) -> Schema:
    """Describe one of a few strings."""
    return text(description) | {"enum": list(values)}


def array(description: str, items: Schema, length: int | None = None) -> Schema:
    """Describe an array of alike values, of any length or of a fixed one."""
    bounds = {} if length is None else {"minItems": length, "maxItems": length}
    return _value("array", description) | {"items": items} | bounds


def table(description: str, values: Schema) -> Schema:
    """Describe an object whose keys are names, with values of one kind."""
    return _value("object", description) | {"additionalProperties": values}


def record(description: str, properties: Mapping[str, Schema], optional: Collection[str] = ()) -> Schema:
    """Describe an object with these keys, all required but the optional ones, and no others."""
    required = [name for name in properties if name not in optional]
    fixed = {"properties": dict(properties), "required": required, "additionalProperties": False}
    return _value("object", description) | fixed


def nullable(schema: Schema) -> Schema:
    """Allow null as well."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    enum = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return schema | {"type": [*kinds, "null"]} | enum


def _value(kind: str, description: str) -> Schema:
    return {"type": kind, "description": description}
