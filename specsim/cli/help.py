"""The layout of --help: commands and options in titled groups, at most 80 columns wide, with nothing cut off."""

import re
import textwrap
from inspect import cleandoc
from typing import Any, ClassVar

from typer.core import TyperCommand, TyperGroup

# Titles in the order of every --help; an option has its title as `rich_help_panel`.
OPTION_GROUPS = (
    "Grid",
    "Kernels",
    "Benchmark",
    "Answers",
    "Report",
    "Fault catalogue",
    "Sweep",
    "Published table",
    "Requests",
    "Model",
    "Draft tree",
    "Verification",
    "Acceptance",
    "Sampling",
    "Data",
    "Training",
    "KV cache",
    "Server",
    "Load",
    "Hardware",
    "Search",
    "Execution",
    "Ranks",
    "Output",
)
COMMAND_GROUPS = ("Run", "Check", "Measure", "Simulate", "Learn")
COMMON = "Common options"
_OTHER = "Other"
_TYPES = {"<int>": "INTEGER", "<float>": "FLOAT", "<str>": "TEXT", "<path>": "PATH"}
_NAMES = 28  # characters of the left column, margin included; a longer name has a line of its own
_WIDTH = 80
_Rows = list[tuple[str, str]]


class CommandHelp(TyperCommand):
    """A command whose help shows its text, then its options by group."""

    common: ClassVar[tuple[str, ...]] = ()  # names of the options that come first, in this order

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the text of the docstring: paragraphs are filled, indented lines stay as they are."""
        for paragraph in cleandoc(self.help or "").split("\n\n"):
            formatter.write("\n")
            lines = paragraph.splitlines()
            if any(line.startswith(" ") for line in lines):
                formatter.write("".join(f"  {line.rstrip()}\n" for line in lines))
            else:
                formatter.write(_filled(" ".join(lines), "  "))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options by group; those of `common` come first, in a group of their own."""
        groups: dict[str, _Rows] = {title: [] for title in (COMMON, *OPTION_GROUPS, _OTHER)}
        params = {param.name: param for param in self.get_params(ctx)}
        for name in (*self.common, *params):
            param = params.pop(name, None)
            record = param and param.get_help_record(ctx)
            if param is None or record is None:
                continue
            title = COMMON if name in self.common else getattr(param, "rich_help_panel", None) or _OTHER
            label = record[0].split()[0] if param.param_type_name == "argument" else _typed(record[0])
            groups[title].append((label, _described(record[1])))
        _write_groups(formatter, groups)


class GenerateHelp(CommandHelp):
    """The help of `generate`, which begins with its ten most common options."""

    common = (
        "prompt",
        "prompt_file",
        "max_new_tokens",
        "temperature",
        "drafter",
        "topk",
        "num_steps",
        "num_draft_tokens",
        "impl",
        "json_file",
    )


class ProgramHelp(TyperGroup):
    """The program, whose help shows its commands by group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, _Rows] = {title: [] for title in COMMAND_GROUPS}
        for name, command in self.commands.items():
            groups[str(getattr(command, "rich_help_panel", None))].append((name, summary(command.help or "")))
        _write_groups(formatter, groups, names=17)
        records = [param.get_help_record(ctx) for param in self.get_params(ctx)]
        _write_groups(formatter, {"Options": [(name, text) for name, text in filter(None, records)]})


def summary(text: str) -> str:
    """Give the first line of a command's docstring."""
    return cleandoc(text).partition("\n")[0]


def _write_groups(formatter: Any, groups: dict[str, _Rows], names: int = _NAMES) -> None:
    for title, rows in groups.items():
        if rows:
            formatter.write(f"\n{title}:\n")
            formatter.write("".join(_entry(*row, names) for row in rows))


def _entry(name: str, text: str, names: int) -> str:
    """Lay out one option or command: its name, and its text in the column to the right."""
    text, bracket, values = text.rpartition("[") if text.endswith("]") else (text, "", "")
    lines = _filled(text, " " * names).splitlines()
    if bracket:  # the default and the range stay together
        if lines and len(lines[-1]) + len(values) + 2 <= _WIDTH:
            lines[-1] += f" [{values}"
        else:
            lines += _filled(f"[{values}", " " * names).splitlines()
    head = f"  {name}"
    if len(head) + 2 <= names and lines:
        lines[0] = head.ljust(names) + lines[0].lstrip()
    else:
        lines.insert(0, head)
    return "".join(f"{line}\n" for line in lines)


def _filled(text: str, indent: str) -> str:
    width = _WIDTH - len(indent)
    lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    return textwrap.indent("\n".join(lines), indent) + "\n"


def _typed(name: str) -> str:
    """Write the type of an option's value in capitals, as metavars are."""
    return re.sub("|".join(_TYPES), lambda match: _TYPES[match[0]], name)


def _described(text: str) -> str:
    """Join a range at the end of a text to its default, and drop parentheses around a default in words."""
    text = text.replace(r"\[", "[")  # some versions of typer escape it for rich
    text = re.sub(r"\[(.*?; )?default: \((.*)\)((?:; required)?\])$", r"[\1default: \2\3", text)
    return re.sub(r"\[([^\]]*)\]  \[default: (.*)\]$", r"[default: \2; \1]", text)
