"""Names and versions of the JSON outputs, which cli.schema describes, and dataclasses read back from them.

A version grows when a key is renamed or removed or changes its meaning. New keys do not change it.
"""

import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from specsim.core.errors import require

VERSIONS = {
    "accept": 2,
    "acceptance": 2,  # acceptance record: of accept --target
    "bench": 1,
    "calibrate": 1,
    "calibrate-published": 1,  # of calibrate --published
    "certify": 1,
    "conformance": 1,
    "diff": 1,
    "explain": 1,
    "exploration": 1,  # of --html
    "faults": 1,
    "generate": 2,
    "lint-report": 1,
    "parity": 1,
    "plan": 2,
    "predict": 1,
    "predict-record": 1,  # of predict --acceptance
    "probe": 1,
    "profile": 1,  # of calibrate --out
    "run": 2,
    "run-compare": 2,  # of run --compare
    "sampling-test": 1,
    "simulate": 2,
    "simulate-table": 1,  # of simulate --table
    "soak": 1,
    "sweep": 1,
}


def schema_name(output: str) -> str:
    """Give the value of the key `schema` in an output, such as specsim/generate/1."""
    return f"specsim/{output}/{VERSIONS[output]}"


_Record = TypeVar("_Record")
_MOST = 2**63 - 1
_ALLOWED = {
    bool: "true or false",
    int: "an integer from 0 to 2^63 - 1",
    float: "a finite number of at least 0",
    str: "a text",
}


def read_dataclass(kind: type[_Record], value: Any, name: str) -> _Record:
    """Make a dataclass of a JSON object with exactly its fields.

    Texts, counts, figures of at least 0, truth values, arrays of them, objects of counts and other dataclasses are
    checked. Raises InputError that names the first field of another type.
    """
    names = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType] - a dataclass
    is_record = isinstance(value, dict) and value.keys() == set(names)
    require(
        is_record, name, value if not isinstance(value, dict) else sorted(value), f"an object of {', '.join(names)}"
    )
    hints = get_type_hints(kind)
    return kind(**{key: _read(hints[key], value[key], f"{name}.{key}") for key in names})


def _read(kind: Any, value: Any, name: str) -> Any:
    if get_origin(kind) is UnionType:
        (kind,) = (member for member in get_args(kind) if member is not type(None))
        return None if value is None else _read(kind, value, name)
    if is_dataclass(kind):
        return read_dataclass(kind, value, name)  # pyright: ignore[reportArgumentType] - a class
    if hasattr(kind, "_fields"):  # a NamedTuple
        kinds = list(get_type_hints(kind).values())
        is_row = isinstance(value, (list, tuple)) and len(value) == len(kinds)
        require(is_row, name, value, f"an array of {len(kinds)} values")
        return kind(*_read_items(kinds, value, name))
    if get_origin(kind) in (list, tuple):  # of any length
        require(isinstance(value, (list, tuple)), name, value, "an array")
        return get_origin(kind)(_read_items(get_args(kind)[:1] * len(value), value, name))
    if get_origin(kind) is dict:
        require(isinstance(value, dict), name, value, "an object")
        return {key: _read(get_args(kind)[1], entry, f"{name}.{key}") for key, entry in value.items()}
    if kind is not Any:
        require(_is_of(kind, value), name, value, _ALLOWED[kind])
    return float(value) if kind is float else value


def _read_items(kinds: Sequence[Any], values: Sequence[Any], name: str) -> list[Any]:
    pairs = enumerate(zip(kinds, values, strict=True))
    return [_read(kind, value, f"{name}[{index}]") for index, (kind, value) in pairs]


def _is_of(kind: type, value: Any) -> bool:
    if kind in (str, bool):
        return isinstance(value, kind)
    return type(value) in (int, kind) and 0 <= value <= (sys.float_info.max if kind is float else _MOST)
