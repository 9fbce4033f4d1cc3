"""Completion of commands and options in bash, zsh and fish, by scripts of click."""

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from specsim.core.errors import require

# Files of a shell below the home folder: the script, and the file that sources it; fish needs none.
FILES = {
    "bash": (".bash_completions/specsim.sh", ".bashrc"),
    "zsh": (".zfunc/specsim.zsh", ".zshrc"),
    "fish": (".config/fish/completions/specsim.fish", ""),
}


def completion_options(variable: str) -> list[click.Option]:
    """Make the options that print or install the script of the current shell; variable: that of its questions."""

    def show(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if not value or context.resilient_parsing:
            return
        shell = Path(os.environ.get("SHELL", "")).name
        require(shell in FILES, "SHELL", shell, "bash, zsh or fish")
        kind = get_completion_class(shell)
        assert kind is not None
        script = kind(context.command, {}, "specsim", variable).source()
        print(script if parameter.name == "show_completion" else _install(shell, script))
        context.exit()

    texts = {"install": "Install completion for the current shell.", "show": "Show completion for the current shell."}
    return [
        click.Option(
            [f"--{verb}-completion"], is_flag=True, is_eager=True, expose_value=False, callback=show, help=text
        )
        for verb, text in texts.items()
    ]


def _install(shell: str, script: str) -> str:
    """Write the script, and the line that sources it."""
    file, profile = (Path.home() / name if name else None for name in FILES[shell])
    assert file is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script, encoding="utf-8")
    line = f"source '{file}'"
    if profile is not None:
        text = profile.read_text(encoding="utf-8") if profile.is_file() else ""
        if line not in text:
            profile.write_text(f"{text}\n{line}\n", encoding="utf-8")
    return f"Completion is installed in {file}; start a new shell."
