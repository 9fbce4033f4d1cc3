"""Reader of dataclasses and tuples from JSON that checks the type of every value."""

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from specsim.core.errors import InputError

_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def read_typed(kind: Any, value: Any, name: str) -> Any:
    """Make a value of a type from its JSON form.

    Raises InputError with the value's path, which begins with `name`.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != kinds.keys():
            raise _unreadable(name, value, f"an object with the fields {', '.join(kinds)}")
        return kind(**{field: read_typed(kinds[field], value[field], f"{name}.{field}") for field in kinds})
    if hasattr(kind, "_fields"):  # a NamedTuple
        kinds = list(get_type_hints(kind).values())
        if not isinstance(value, (list, tuple)) or len(value) != len(kinds):
            raise _unreadable(name, value, f"an array of {len(kinds)} values")
        return kind(*_read_items(kinds, value, name))
    origin = get_origin(kind)
    if origin is list or origin is tuple:  # of any length
        if not isinstance(value, (list, tuple)):
            raise _unreadable(name, value, "an array")
        return origin(_read_items(get_args(kind)[:1] * len(value), value, name))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _unreadable(name, value, _NAMES[kind])
    return value


def _read_items(kinds: Sequence[Any], values: Sequence[Any], name: str) -> list[Any]:
    pairs = enumerate(zip(kinds, values, strict=True))
    return [read_typed(kind, value, f"{name}[{index}]") for index, (kind, value) in pairs]


def _unreadable(name: str, value: Any, allowed: str) -> InputError:
    shown = value if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    return InputError(name, shown, allowed)
