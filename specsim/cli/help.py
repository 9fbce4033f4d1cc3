"""The layout of --help: commands and options in titled groups, at most 80 columns wide, with nothing cut off."""

import textwrap
from dataclasses import MISSING
from inspect import cleandoc
from typing import Any

from specsim.cli.config_file import ConfigFiles
from specsim.cli.option_fields import OptionField

# Titles in the order of every --help.
OPTION_GROUPS = (
    "Grid", "Kernels", "Benchmark", "Answers", "Tensors", "Report", "Fault catalogue", "Sweep", "Published table",
    "Requests", "Model", "Draft tree", "Verification", "Acceptance", "Sampling", "Data", "Training", "KV cache",
    "Server", "Checks", "Load", "Hardware", "Search", "Execution", "Ranks", "Output", "Configuration",
)  # fmt: skip
_NAMES = 28  # characters of the left column, margin included; a longer name has a line of its own
_WIDTH = 80
_Rows = list[tuple[str, str, str]]  # name, text, and default and range


def write_text(formatter: Any, text: str) -> None:
    """Write the text of a docstring: paragraphs are filled, indented lines stay as they are."""
    for paragraph in cleandoc(text).split("\n\n"):
        formatter.write("\n")
        lines = paragraph.splitlines()
        if any(line.startswith(" ") for line in lines):
            formatter.write("".join(f"  {line.rstrip()}\n" for line in lines))
        else:
            formatter.write(_filled(" ".join(lines), "  "))


def write_groups(formatter: Any, kind: type | None, options: list[OptionField], helps: dict[str, str]) -> None:
    """Write options by group, and at the end the options that show help."""
    groups: dict[str, _Rows] = {title: [] for title in OPTION_GROUPS}
    for field in options:
        groups[field.option.group].append((" ".join(words(field)), description(field, kind), default(field)))
    write_rows(formatter, groups | {"Help": [(name, text, "") for name, text in helps.items()]})


def words(field: OptionField) -> tuple[str, ...]:
    """Write the names of an option, and the form of its value."""
    if field.option.is_argument:
        return (field.label,)
    if field.option.is_negatable:
        return field.label, "/", f"--no{field.label[1:]}"
    return tuple(filter(None, (field.label, field.values)))


def description(field: OptionField, kind: type | None) -> str:
    """Write the comment of a field, as a sentence."""
    from specsim.cli.schema import comments

    text = ((comments(kind) if kind is not None else {}) | comments(ConfigFiles))[field.name]
    return text.replace("{names}", field.option.names)


def default(field: OptionField) -> str:
    """Write the default and the range of an option in brackets; empty for neither."""
    text = field.option.default
    if not text and field.kind is bool and field.option.is_negatable:
        text = field.label[2:] if field.default else f"no-{field.label[2:]}"
    elif not text and field.kind is not bool and field.default not in (None, MISSING, ""):
        text = str(field.default)
    parts = [f"default: {text}" if text else "", field.limits, "required" if field.default is MISSING else ""]
    inside = "; ".join(filter(None, parts))
    return f"[{inside}]" if inside else ""


def write_rows(formatter: Any, groups: dict[str, _Rows], names: int = _NAMES) -> None:
    """Write rows below the title of their group."""
    for title, rows in groups.items():
        if rows:
            formatter.write(f"\n{title}:\n")
            formatter.write("".join(_entry(*row, names) for row in rows))


def _entry(name: str, text: str, values: str, names: int) -> str:
    """Lay out one option or command: its name, and its text in the column to the right."""
    lines = _filled(text, " " * names).splitlines()
    if values:  # the default and the range stay together
        if lines and len(lines[-1]) + len(values) + 1 <= _WIDTH:
            lines[-1] += f" {values}"
        else:
            lines += _filled(values, " " * names).splitlines()
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
