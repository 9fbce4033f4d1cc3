"""specsim simulate: published tables beside what the simulator makes of them."""

from typing import TYPE_CHECKING, Annotated

import typer

from specsim import options

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.reproduce.reproduction import Reproduction


def simulate(
    table: Annotated[str, typer.Option(help="Which; an unknown name shows them all.", metavar="NAME")],
    json_file: options.JsonFile = None,
) -> None:
    """Reproduce a published table: side by side, every error, what was fitted."""
    from specsim.display import stdout_console
    from specsim.files import check_writable, write_json
    from specsim.simulator.reproduce import reproduction

    check_writable(json_file)
    result = reproduction(table)()
    try:
        show(result, stdout_console())
    finally:
        write_json(json_file, result.to_json())


def show(result: "Reproduction", console: "Console") -> None:
    """What came of a table, with every error."""
    from specsim.display import heading, paragraph, print_table
    from specsim.simulator.reproduce.reproduction import parameter_cells

    console.print(f"{result.name}, {result.source}")
    console.print()
    paragraph(console, result.method)
    heading(console, "side by side")
    print_table(
        console, ("setting", "", "published", "simulated", "error", ""), [each.cells() for each in result.figures]
    )
    if result.parameters:
        heading(console, "parameters and their intervals")
        print_table(
            console, ("parameter", "value", "from", "to", "unit"), [parameter_cells(each) for each in result.parameters]
        )
    heading(console, "asked")
    print_table(console, (), [(each.what, each.value, "met" if each.is_met else "not met") for each in result.asked])
    for note in result.notes:
        console.print()
        paragraph(console, note)
