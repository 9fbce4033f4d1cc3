"""Commands of the command line: a function of one dataclass, whose fields are read from words and a file."""

from collections.abc import Callable
from dataclasses import MISSING
from inspect import cleandoc, signature
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from specsim.cli.config_file import CONFIG_FIELDS, read_config, write_config
from specsim.cli.file_options import NamedFile, check_files, named_files
from specsim.cli.help import write_groups, write_text
from specsim.cli.option_fields import OptionField, option_fields
from specsim.core.errors import InputError
from specsim.core.files import check_writable

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
