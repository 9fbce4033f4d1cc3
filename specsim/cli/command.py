"""Commands of the command line: a function of one dataclass, whose fields are read from words and a file.

Every output of a command can be written, and is none of its other files.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING
from inspect import cleandoc, signature
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from specsim.cli.config_file import CONFIG_FIELDS, read_config, write_config
from specsim.cli.help import write_groups, write_text
from specsim.cli.option_fields import OptionField, option_fields
from specsim.core.errors import InputError
from specsim.core.files import check_writable, is_same_file

MOST_SHOWN = 20  # options of --help


class FieldType(click.ParamType):
    """The type of a field, whose bad values are reported in one sentence."""

    name = "value"

    def __init__(self, field: OptionField) -> None:
        self.field = field

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read the text of a value."""
        return self.field.parse(value) if isinstance(value, str) else value


class Command(click.Command):
    """A command that calls a function with the dataclass that is the type of its parameter."""

    def __init__(self, function: Callable[..., None]) -> None:
        kinds = [parameter.annotation for parameter in signature(function).parameters.values()]
        self.function = function
        self.kind: Any = kinds[0] if kinds else None
        self.fields = option_fields(self.kind) if kinds else {}
        has_options = any(not field.option.is_argument for field in self.fields.values())
        self.all_fields = self.fields | (CONFIG_FIELDS if has_options else {})
        params = [_parameter(field) for field in self.all_fields.values()]
        super().__init__(command_name(function), help=cleandoc(function.__doc__ or ""), add_help_option=False)
        self.params = [*params, *(_help_option(self, names) for names in (["--help-all"], ["-h", "--help"]))]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options from words and --config, as one value."""
        rest = super().parse_args(ctx, args)
        if self.kind is not None and not ctx.resilient_parsing:
            names = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
            words = {name: ctx.params[name] for name in names}
            ctx.params = self._values(
                {name: list(value) if isinstance(value, tuple) else value for name, value in words.items()}
            )
        return rest

    def _values(self, words: dict[str, Any]) -> dict[str, Any]:
        """Make the value of the options, and see that its outputs can be written."""
        files = {name: words.pop(name, None) for name in CONFIG_FIELDS}
        values = words
        if files["config"] is not None:
            values = read_config(files["config"], str(self.name), self.kind)
            for name in sorted(values.keys() & words):
                allowed = f"nothing where {files['config']} has it: leave out {self.fields[name].label} or that key"
                value = words[name]
                raise InputError(name, str(value) if isinstance(value, Path) else value, allowed)
            values |= words
        _check_files([(field, (values | files).get(name)) for name, field in self.all_fields.items()])
        for field in self.fields.values():
            if field.option.presets is not None and field.name in values:
                values = {**field.option.presets[values[field.name]], **values}
            if field.default is MISSING and field.name not in values:
                kind = "argument" if field.option.is_argument else "option"
                raise click.UsageError(f"Missing {kind} '{field.label}'.")
        options = self.kind(**values)
        return {"options": options, "save_config": files["save_config"]}

    def invoke(self, ctx: click.Context) -> None:
        """Write the options where they are to be saved, and run the command."""
        if self.kind is None:
            self.function()
            return
        if ctx.params["save_config"] is not None:
            write_config(ctx.params["save_config"], ctx.params["options"])
        self.function(ctx.params["options"])

    def options_of_help(self, is_whole: bool) -> list[OptionField]:
        """List the options of --help-all, or those of --help."""
        fields = list(self.all_fields.values())
        is_short = len(fields) + 2 <= MOST_SHOWN  # --help-all and --help are two more
        return fields if is_whole or is_short else [field for field in fields if field.option.is_common]

    def write_help(self, ctx: click.Context, is_whole: bool) -> str:
        """Write the text of --help or --help-all."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        write_text(formatter, self.help or "")
        fields = self.options_of_help(is_whole)
        count = len(self.all_fields)
        text = "" if len(fields) == count else f" {count - len(fields)} more are in --help-all."
        helps = {"--help-all": f"Show all {count} options." if text else "", "-h, --help": f"Show this message.{text}"}
        write_groups(formatter, self.kind, fields, {name: text for name, text in helps.items() if text})
        return formatter.getvalue().rstrip("\n")

    def get_help(self, ctx: click.Context) -> str:
        """Write the text of --help."""
        return self.write_help(ctx, is_whole=False)


def command_name(function: Callable[..., None]) -> str:
    """Name the command of a function in the command line."""
    return function.__name__.replace("_", "-")


def summary(function: Callable[..., None]) -> str:
    """Give the first line of the docstring of a command's function."""
    return (function.__doc__ or "").partition("\n")[0]


class NamedFile(NamedTuple):
    """A file of a command, the option or argument that names it, and whether the command writes it."""

    path: Path
    name: str  # of the field
    label: str  # of the option in the command line
    is_output: bool


def named_files(field: OptionField, value: Any) -> list[NamedFile]:
    """List the files that the value of a field names."""
    role = field.option.file
    if value is None or not role:
        return []
    texts = value if isinstance(value, list) else [value]
    if role != "reads":
        return [NamedFile(Path(text), field.name, field.label, is_output=True) for text in texts]
    paths = [path for text in texts for path in _paths(str(text))]
    return [NamedFile(path, field.name, field.label, is_output=False) for path in paths]


def check_files(files: Sequence[NamedFile]) -> None:
    """Raise InputError if an output is another file of the command."""
    for first, second in combinations(files, 2):
        output, other = (second, first) if second.is_output else (first, second)
        if output.name == other.name or not output.is_output:
            continue
        if is_same_file(output.path, other.path):
            raise InputError(output.name, str(output.path), f"another file than that of {other.label}")
        if not other.is_output and _is_part(output.path, other.path):
            raise InputError(output.name, str(output.path), f"a file outside the folder of {other.label}")


def _is_part(file: Path, folder: Path) -> bool:
    """Check whether an existing file is in a folder, or is another name of a file in it."""
    if not (file.exists() and folder.is_dir()):
        return False
    with suppress(OSError):
        return folder.resolve() in file.resolve().parents or any(
            is_same_file(file, entry) for entry in folder.iterdir()
        )
    return False


def _paths(text: str) -> Iterator[Path]:
    """List the existing files and folders that a value may name: FILE, FILE#N, FILE:NAME, MODULE:NAME, NAME=FILE,FILE.

    A module is searched as Python does.
    """
    for part in (text, *text.partition("=")[2].split(",")):
        for name in {part, part.rpartition("#")[0], part.rpartition(":")[0]} - {""}:
            paths = [Path(os.path.expanduser(name))]  # noqa: PTH111 - Path's raises where there is no such user
            if all(map(str.isidentifier, name.split("."))):
                module = name.replace(".", "/")
                paths += [Path(root, module + end) for root in ("", *sys.path) for end in (".py", "/__init__.py")]
            yield from filter(os.path.exists, paths)


def _check_files(values: list[tuple[OptionField, Any]]) -> None:
    files: list[NamedFile] = []
    for field, value in values:
        files += named_files(field, value)
        check_files(files)
        if value is not None and field.option.file == "writes":
            check_writable(Path(value), field.name)


def _parameter(field: OptionField) -> click.Parameter:
    """Make the option or argument of a field; its value stays open where there is none."""
    if field.option.is_argument:
        count = -1 if field.is_list else 1
        values = field.values if field.default is MISSING else f"[{field.values}]"
        return click.Argument([field.name], type=FieldType(field), required=False, nargs=count, metavar=values)
    if field.kind is bool:
        other = f"/--no{field.label[1:]}" if field.option.is_negatable else ""
        return click.Option([f"{field.label}{other}", field.name], is_flag=True)
    return click.Option([field.label, field.name], type=FieldType(field), multiple=field.is_list)


def _help_option(command: Command, names: list[str]) -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            print(command.write_help(ctx, is_whole=names == ["--help-all"]))
            ctx.exit()

    return click.Option(names, is_flag=True, is_eager=True, expose_value=False, callback=show)
