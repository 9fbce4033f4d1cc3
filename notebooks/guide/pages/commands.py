"""Pages of the command line, from the commands themselves: every option with its values, default and text."""

import re
from inspect import cleandoc
from typing import Any

from typer.main import get_command

from notebooks.guide.pages.docstrings import cell, code_cell, markdown, table
from specsim.cli.main import app

_VALUES = re.compile(r"^(?P<text>.*?)\s*\[(?P<values>[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]$", re.DOTALL)

_TYPES = {"<int>": "integer", "<float>": "number", "<str>": "text", "<path>": "path"}


def command_pages() -> dict[str, str]:
    """Write the list of all commands, and a page for each, by path in the site's source."""
    program: Any = get_command(app)
    context = program.make_context("specsim", [], resilient_parsing=True)
    commands = {name: program.commands[name] for name in program.list_commands(context)}
    pages = {f"cli/{name}.md": _page(name, command, context) for name, command in commands.items()}
    return pages | {"generated/commands.md": _list(program, commands, context)}


def _list(program: Any, commands: dict[str, Any], context: Any) -> str:
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name, command in commands.items():
        first_line = cell(cleandoc(command.help or "").partition("\n")[0])
        groups.setdefault(_title(command) or "Commands", []).append((f"[`{name}`](cli/{name}.md)", first_line))
    lines: list[str] = []
    for title, rows in groups.items():
        lines += [f"## {title}", "", *table(("command", "purpose"), rows), ""]
    lines += ["## Options before a command", "", *_options(program, context)["Options"], ""]
    lines += ["```{toctree}", ":hidden:", "", *(f"cli/{name}" for name in commands), "```"]
    return "\n".join(lines) + "\n"


def _page(name: str, command: Any, parent: Any) -> str:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    usage = " ".join(["specsim", name, *command.collect_usage_pieces(context)])
    lines = [f"# `specsim {name}`", "", markdown(_separated(cleandoc(command.help or ""))), ""]
    lines += ["```text", usage, "```", ""]
    for title, rows in _options(command, context).items():
        lines += [f"## {title}", "", *rows, ""]
    return "\n".join(lines) + "\n"


def _separated(text: str) -> str:
    """Make code of the indented lines of a command's help, and of lines that begin with `Try:`."""
    text = re.sub(r"^(Try|Example):\s*(specsim .*)$", r"\1:\n    \2", text, flags=re.MULTILINE)
    return re.sub(r"^ +(?=\S)", "    ", text, flags=re.MULTILINE)


def _options(command: Any, context: Any) -> dict[str, list[str]]:
    """Write a table of each group of options, in the order of the first option of each."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            groups.setdefault(_title(parameter) or "Options", []).append(_row(*record))
    return {title: table(("option", "description", "values", "default, range"), rows) for title, rows in groups.items()}


def _title(part: Any) -> str | None:
    title = getattr(part, "rich_help_panel", None)
    return title if isinstance(title, str) else None


def _row(names: str, text: str) -> tuple[str, ...]:
    """Split what --help says of an option into cells."""
    parts = names.split(" ")
    words = [word for word in parts if word.startswith("-") or word == "/"]
    value = " ".join(word for word in parts if word not in words).strip("[]")
    limits: list[str] = []
    while match := _VALUES.match(text):
        text = match["text"]
        limits += [match["values"].removeprefix("default: ")]
    default_and_range = cell("; ".join(re.sub(r"^\((.*)\)$", r"\1", limit) for limit in limits))
    if not words:  # an argument
        return code_cell(value), cell(text), "", default_and_range
    choices = ", ".join(_TYPES.get(limit) or code_cell(limit) for limit in value.split("|"))
    return code_cell(" ".join(words)), cell(text), choices, default_and_range
