"""Options as fields of frozen dataclasses: name, type and default of a field, its comment as help, and its range.

A command is a function of one dataclass. Groups of options that commands share are its base classes.
"""

import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from specsim.core.errors import InputError, require, require_choice, without_user
from specsim.core.limits import LEAST_MAGNITUDE, MOST_TOKENS, NumberRange

_ALLOWED = {int: "an integer", float: "a number", str: "a text", Path: "a path", bool: "true or false"}
_TYPES = {int: "INTEGER", float: "FLOAT", str: "TEXT", Path: "FILE"}
_NUMBERS = {int: re.compile(r"[+-]?[0-9]+"), float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")}
MOST_DIGITS = 40  # of an integer


_FREE = NumberRange()


@dataclass(frozen=True, slots=True)
class FieldOption:
    """Command-line side of a field, the metadata of its type."""

    group: str  # title in --help
    range: NumberRange = _FREE  # of a number; the field's type may state it, too
    limits: str = ""  # range in words, where it depends on other options: the command checks it
    values: str = ""  # form of a value in --help; its type otherwise. no secret of a URL is written
    default: str = ""  # words for the default in --help; - for none
    names: str = ""  # text that {names} stands for in the comment
    file: Literal["reads", "writes", "folder", ""] = ""  # role of the files that a value names
    is_common: bool = False  # whether --help shows it, and not only --help-all
    is_argument: bool = False  # whether it has no name in the command line
    is_negatable: bool = False  # whether --no-NAME turns it off
    choices: tuple[str, ...] = ()  # allowed texts, where the type does not name them
    presets: Mapping[str, Mapping[str, Any]] | None = None  # defaults of other fields by value


def option(group: str, **settings: Any) -> FieldOption:
    """Make an option that --help-all shows; at_least, at_most and above are its range."""
    limits = {name: settings.pop(name) for name in ("at_least", "at_most", "above") if name in settings}
    return FieldOption(group, range=NumberRange(**limits), **settings)


def common(group: str, **settings: Any) -> FieldOption:
    """Make an option that --help shows too."""
    return option(group, is_common=True, **settings)


@dataclass(frozen=True, slots=True)
class OptionField:
    """A field of a command's dataclass with what the command line needs of it."""

    name: str
    kind: type  # int, float, str, bool or Path; of a list that of its entries
    choices: tuple[str, ...]
    is_list: bool
    default: Any  # MISSING where a value is required
    option: FieldOption

    @property
    def label(self) -> str:
        """Name in the command line."""
        return self.values if self.option.is_argument else f"--{self.name.replace('_', '-')}"

    @property
    def values(self) -> str:
        """Form of a value in --help; empty for a flag."""
        if self.kind is bool:
            return ""
        return self.option.values or "|".join(self.choices) or _TYPES[self.kind]

    @property
    def limits(self) -> str:
        """Range of a value in words; empty where every value is allowed."""
        return str(self.option.range) or self.option.limits

    def parse(self, text: str) -> Any:
        """Read a value of the command line."""
        form = _NUMBERS.get(self.kind)
        digits = MOST_DIGITS if self.kind is int else len(text)
        is_number = form is None or (form.fullmatch(text) and len(text) <= digits)
        require(is_number, self.name, text, _ALLOWED[self.kind])
        return self._checked(self.kind(text))

    def read(self, value: Any) -> Any:
        """Read a value of a file, which has a type."""
        if not self.is_list:
            return self._typed(value)
        require(isinstance(value, list), self.name, value, f"a list, each entry {_ALLOWED[self.kind]}")
        return [self._typed(entry) for entry in value]

    def _typed(self, value: Any) -> Any:
        kinds = {Path: (str,), float: (int, float)}.get(self.kind, (self.kind,))
        require(type(value) in kinds, self.name, value, " or ".join(self.choices) or _ALLOWED[self.kind])
        return self._checked(self.kind(value))

    def _checked(self, value: Any) -> Any:
        limits = self.option.range
        if self.choices:
            require_choice(self.name, value, self.choices)
        require(value in limits, self.name, value, limits.allowed(_ALLOWED[self.kind]))
        if self.kind is int and limits.at_most is None:
            require(abs(value) <= MOST_TOKENS, self.name, value, "an integer of at most 2^31 - 1")
        if self.kind is float:
            allowed = f"a finite number, 0 or of a magnitude of at least {LEAST_MAGNITUDE:g}"
            is_sound = value == 0 or LEAST_MAGNITUDE <= abs(value) < math.inf
            require(is_sound, self.name, value, allowed)
        return value


@cache
def option_fields(kind: type) -> dict[str, OptionField]:
    """List the fields of a command's dataclass by name, those that no base class has first.

    A base class may have the option of a field.
    """
    hints: dict[str, Any] = {}
    options: dict[str, FieldOption] = {}
    for base in reversed(kind.__mro__):
        for name, hint in get_annotations(base).items():
            hints[name] = hint
            parts = get_args(hint) if get_origin(hint) is Annotated else ()
            options.update((name, part) for part in parts if isinstance(part, FieldOption))
            for part in _ranges(hint):
                options[name] = replace(options[name], range=part)
    in_bases = {name for base in kind.__mro__[1:] for name in get_annotations(base)}
    ordered = sorted(fields(kind), key=lambda field: field.name in in_bases)
    return {field.name: _option_field(field, hints[field.name], options[field.name]) for field in ordered}


def _option_field(field: Any, hint: Any, option: FieldOption) -> OptionField:
    hint = _plain(hint)
    if get_origin(hint) in (UnionType, Union):
        (hint,) = (_plain(part) for part in get_args(hint) if part is not NoneType)
    is_list = get_origin(hint) is list
    if is_list:
        (hint,) = get_args(hint)
    choices = get_args(hint) if get_origin(hint) is Literal else option.choices or tuple(option.presets or ())
    return OptionField(field.name, str if choices else hint, choices, is_list, field.default, option)


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _ranges(hint: Any) -> Iterator[NumberRange]:
    """List the ranges that a type states."""
    for part in get_args(hint):
        yield from [part] if isinstance(part, NumberRange) else _ranges(part)


def changed(options: Any) -> dict[str, Any]:
    """List the values that are not the defaults, by name, for files and texts."""
    values = {
        name: without_user(value).partition("?")[0] if field.option.values == "URL" and value else value
        for name, field in option_fields(type(options)).items()
        for value in [getattr(options, name)]
    }
    return {name: value for name, value in values.items() if value != option_fields(type(options))[name].default}


def command_line(command: str, options: Any, without: Collection[str] = ()) -> str:
    """Write the command line that gives these options, without outputs, presets and those of `without`."""
    words = ["specsim", command]
    kinds = option_fields(type(options))
    for name, value in changed(options).items():
        if name in without or kinds[name].option.file == "writes" or kinds[name].option.presets:
            continue
        label = kinds[name].label if value is not False else f"--no{kinds[name].label[1:]}"
        for entry in value if isinstance(value, list) else [value]:
            words += [label] if isinstance(entry, bool) else [label, str(entry)]
    return shlex.join(words)


def refuse_changes(options: Any, names: Iterable[str], why: str) -> None:
    """Raise InputError for the first of these options that is not the default; why: the end of the sentence."""
    changes = changed(options)
    for name in names:
        if name in changes:
            default = option_fields(type(options))[name].default
            value = changes[name] if isinstance(changes[name], (int, float)) else str(changes[name])
            raise InputError(name, value, f"only {default}, the default, {why}")


def refuse_others(options: Any, names: Collection[str], why: str) -> None:
    """Raise InputError for the first option with another name that is not the default."""
    refuse_changes(options, [name for name in option_fields(type(options)) if name not in names], why)
