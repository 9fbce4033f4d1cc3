"""specsim schema: the JSON Schema of an output."""

from pathlib import Path
from typing import Annotated

import typer

from specsim.core.errors import require_choice
from specsim.core.json_schema import VERSIONS, schema_name

FOLDER = Path(__file__).parent / "schemas"


def schema(
    output: Annotated[
        str | None,
        typer.Argument(
            help="Command whose output is described, or acceptance (of accept --target), predict-record (of predict "
            "--acceptance), simulate-table (of simulate --table), run-compare (of run --compare) or exploration (the "
            "data of --html).",
            metavar="COMMAND",
            rich_help_panel="Output",
            show_default="list all",
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a command's --json output.

    Every output names its schema under the key "schema", such as specsim/generate/1. The number is the version.

    Exit status: 0 when done, 2 for bad input.

    Examples:
      specsim schema
      specsim schema generate
    """
    if output is not None:
        require_choice("command", output, VERSIONS)
        print(_file(output).read_text(encoding="utf-8"), end="")
        return
    from specsim.core.display import print_table, stdout_console

    console = stdout_console()
    print_table(console, ("output", "schema"), [(name, schema_name(name)) for name in VERSIONS])
    console.print(f"\nThe documents (JSON Schema, draft 2020-12) are in {FOLDER}.", soft_wrap=True)


def _file(output: str) -> Path:
    return FOLDER / f"{output}.json"
