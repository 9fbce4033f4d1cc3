"""Check of the arguments of public functions and values by their annotations; all rooms use it."""

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, get_annotations, signature
from numbers import Integral
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, is_typeddict

from specsim.core.errors import InputError
from specsim.core.limits import NumberRange

Checked = TypeVar("Checked", bound=Callable[..., Any])
_DIMENSIONS = re.compile("_([A-Z]+)$")  # of a tensor's name
_MOST = 2**64  # integers beyond it are in no tensor and no file
_INTEGER = "an integer of at most 64 bits"
_NUMBER = "a finite number"
_MOST_SHOWN = 4  # entries of a list in an error


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """Values that an annotation allows."""

    fits: Callable[[Any], bool]
    words: str


def check_arguments(function: Checked) -> Checked:
    """Make a function or class check its arguments by their annotations at each call.

    InputError names the first wrong one. Defaults are allowed as they are; nested annotations are checked, too.
    """
    if isinstance(function, type):
        checked_class: Any = function
        checked_class.__init__ = check_arguments(checked_class.__init__)
        return checked_class
    parameters = signature(function).parameters
    kinds = {
        name: _argument_type(name, parameter.annotation)
        for name, parameter in parameters.items()
        if parameter.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    }
    defaults = {name: parameter.default for name, parameter in parameters.items()}

    def call(*arguments: Any, **named: Any) -> Any:
        for items in (zip(kinds, arguments, strict=False), named.items()):
            for name, value in items:
                if name in kinds and not (_is_default(value, defaults[name]) or kinds[name].fits(value)):
                    raise InputError(name, _outline(value), kinds[name].words)
        return function(*arguments, **named)

    checked_function: Any = wraps(function)(call)
    return checked_function


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, float) and value == default)


def _outline(value: Any) -> Any:
    """Give a value whose repr is short, or its type."""
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_SHOWN:
        return type(value)(map(_outline, value)) if type(value) in (list, tuple) else type(value)
    return value if value is None or isinstance(value, (str, int, float)) else type(value)


def _argument_type(name: str, annotation: Any) -> ArgumentType:
    """Compile an annotation; one that cannot be checked, such as the name of a class, allows every value."""
    kind = _compiled(annotation)
    dimensions = _DIMENSIONS.search(name)
    if dimensions is None or getattr(annotation, "__name__", "") != "Tensor":
        return kind
    ndim = len(dimensions[1])
    return ArgumentType(lambda value: kind.fits(value) and value.ndim == ndim, f"{kind.words} of {ndim} dimensions")


def _compiled(annotation: Any) -> ArgumentType:
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Annotated:
        limits = [part for part in parts[1:] if isinstance(part, NumberRange)]
        return _within(_compiled(parts[0]), *limits) if limits else _compiled(parts[0])
    if isinstance(annotation, TypeVar) and annotation.__constraints__:
        return _compiled(Union[annotation.__constraints__])  # noqa: UP007 - of a tuple
    if origin in (Callable, None) and (origin or annotation) in _PLAIN:
        return _PLAIN[origin or annotation]
    if origin is Literal:
        return ArgumentType(lambda value: isinstance(value, str) and value in parts, " or ".join(map(str, parts)))
    if origin in (UnionType, Union):
        members = [_compiled(part) for part in parts]
        words = " or ".join(dict.fromkeys(member.words for member in members))
        return ArgumentType(lambda value: any(member.fits(value) for member in members), words)
    if origin is tuple and Ellipsis not in parts:
        return _fixed(parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*map(_compiled, parts))
    if isinstance(origin, type) and issubclass(origin, Collection):
        entry = _ENTRY if parts[0] is int else _compiled(parts[0])
        return _collection(entry, is_ordered=issubclass(origin, Sequence))
    if origin is not None and not isinstance(annotation, type):
        annotation = origin
    return _instance(annotation) if isinstance(annotation, type) else _PLAIN[Any]


def _within(number: ArgumentType, limits: NumberRange) -> ArgumentType:
    kind = "an integer" if number.words == _INTEGER else "a number" if limits.at_most is not None else _NUMBER
    return ArgumentType(lambda value: number.fits(value) and value in limits, limits.allowed(kind))


def _instance(kind: type) -> ArgumentType:
    words = f"an object of type {kind.__name__}"
    if is_typeddict(kind):
        return _PLAIN[Any]
    if kind.__name__ == "Tensor":
        return ArgumentType(lambda value: isinstance(value, kind) and not value.is_meta, "a tensor with values")
    if (names := getattr(kind, "_fields", None)) is not None:  # a NamedTuple, which a plain tuple stands for
        size = len(names)
        return ArgumentType(lambda value: isinstance(value, tuple) and len(value) == size, words)
    if not getattr(kind, "_is_protocol", False):
        return ArgumentType(lambda value: isinstance(value, kind), words)
    if getattr(kind, "_is_runtime_protocol", False):
        return ArgumentType(lambda value: isinstance(value, kind) and not isinstance(value, type), words)
    bases = [base for base in kind.__mro__ if getattr(base, "_is_protocol", False)]
    members = {name for base in bases for name in (*vars(base), *get_annotations(base))}
    members = {name for name in members if not name.startswith("_") or name == "__call__"}

    def fits(value: Any) -> bool:
        return not isinstance(value, type) and any(hasattr(value, member) for member in members)  # not all are called

    return ArgumentType(fits, f"{words}, with {', '.join(sorted(members))}")


def _collection(entry: ArgumentType, is_ordered: bool) -> ArgumentType:
    others = (str, bytes, bytearray, memoryview, Mapping, type)

    def fits(values: Any) -> bool:
        if isinstance(values, others):
            return False
        if hasattr(values, "tolist"):  # of an array or a tensor
            if getattr(values, "is_meta", False):
                return False
            values = values.tolist()
        return isinstance(values, Collection) and all(map(entry.fits, values))

    return ArgumentType(fits, f"a {'list' if is_ordered else 'collection'}, each entry {entry.words}")


def _fixed(parts: tuple[Any, ...]) -> ArgumentType:
    entries = [_compiled(part) for part in parts]

    def fits(values: Any) -> bool:
        is_tuple = isinstance(values, (tuple, list)) and len(values) == len(entries)
        return is_tuple and all(entry.fits(value) for entry, value in zip(entries, values, strict=True))

    return ArgumentType(fits, f"({', '.join(entry.words for entry in entries)})")


def _mapping(key: ArgumentType, entry: ArgumentType) -> ArgumentType:
    def fits(values: Any) -> bool:
        is_mapping = isinstance(values, Mapping)
        return is_mapping and all(key.fits(name) and entry.fits(value) for name, value in values.items())

    return ArgumentType(fits, f"a mapping of {key.words} to {entry.words}")


def _is_integer(value: Any) -> bool:
    return type(value) is int and -_MOST < value < _MOST


def _is_integer_entry(value: Any) -> bool:
    """Check an entry of a list, which may be of numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool) and _is_integer(int(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


_ENTRY = ArgumentType(_is_integer_entry, _INTEGER)
_PLAIN: dict[Any, ArgumentType] = {
    Any: ArgumentType(lambda value: True, "any value"),
    object: ArgumentType(lambda value: True, "any value"),
    Parameter.empty: ArgumentType(lambda value: True, "any value"),
    None: ArgumentType(lambda value: value is None, "None"),
    NoneType: ArgumentType(lambda value: value is None, "None"),
    bool: ArgumentType(lambda value: isinstance(value, bool), "True or False"),
    int: ArgumentType(_is_integer, _INTEGER),
    float: ArgumentType(_is_number, _NUMBER),
    str: ArgumentType(lambda value: isinstance(value, str), "a text"),
    Callable: ArgumentType(callable, "a function"),
}
