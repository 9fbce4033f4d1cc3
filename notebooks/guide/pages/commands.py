"""Pages of the command line, from the commands themselves: every option with its values, default and text."""

import re

import click

from notebooks.guide.pages.docstrings import cell, code_cell, markdown, table
from specsim.cli.command import Command, command_name, summary
from specsim.cli.help import OPTION_GROUPS, default, description, words
from specsim.cli.main import COMMANDS, FUNCTIONS, app, command
from specsim.cli.option_fields import OptionField

_TYPES = {"INTEGER": "integer", "FLOAT": "number", "TEXT": "text"}


def command_pages() -> dict[str, str]:
    """Write the list of all commands, and a page for each, by path in the site's source."""
    context = app.make_context("specsim", [], resilient_parsing=True)
    pages = {f"cli/{name}.md": _page(command(name), context) for name in FUNCTIONS}
    return pages | {"generated/commands.md": _list(context)}


def _list(context: click.Context) -> str:
    lines: list[str] = []
    for title, functions in COMMANDS.items():
        names = {command_name(function): cell(summary(function)) for function in functions}
        rows = [(f"[`{name}`](cli/{name}.md)", text) for name, text in names.items()]
        lines += [f"## {title}", "", *table(("command", "purpose"), rows), ""]
    records = [record for param in app.get_params(context) if (record := param.get_help_record(context))]
    rows = [(code_cell(names), cell(text)) for names, text in records]
    lines += ["## Options before a command", "", *table(("option", "description"), rows), ""]
    lines += ["```{toctree}", ":hidden:", "", *(f"cli/{name}" for name in FUNCTIONS), "```"]
    return "\n".join(lines) + "\n"


def _page(program: Command, parent: click.Context) -> str:
    context = program.make_context(program.name, [], parent=parent, resilient_parsing=True)
    usage = " ".join(["specsim", str(program.name), *program.collect_usage_pieces(context)])
    lines = [f"# `specsim {program.name}`", "", markdown(_separated(program.help or "")), ""]
    lines += ["```text", usage, "```", ""]
    for title in OPTION_GROUPS:
        rows = [_row(field, program) for field in program.all_fields.values() if field.option.group == title]
        if not rows:
            continue
        lines += [f"## {title}", "", *table(("option", "description", "values", "default, range"), rows), ""]
    return "\n".join(lines) + "\n"


def _separated(text: str) -> str:
    """Make code of the indented lines of a command's help."""
    return re.sub(r"^ +(?=\S)", "    ", text, flags=re.MULTILINE)


def _row(field: OptionField, program: Command) -> tuple[str, ...]:
    """Write what --help says of an option as cells."""
    names = " ".join(word for word in words(field) if word.startswith("-") or word == "/") or field.label
    values = "" if field.option.is_argument else field.values
    choices = ", ".join(_TYPES.get(value) or code_cell(value) for value in filter(None, values.split("|")))
    limits = default(field).strip("[]").removeprefix("default: ")
    return code_cell(names), cell(description(field, program.kind)), choices, cell(limits)
