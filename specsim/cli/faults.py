"""specsim faults: run the fault catalogue."""

from typing import Annotated

import typer

from specsim.cli import options


def faults(
    name: Annotated[list[str] | None, typer.Option(help="Only this one; more than one may be given.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the faults.")] = 2,
    device: options.Device = None,
    json_file: options.JsonFile = None,
) -> None:
    """Inject known faults, and see that each is detected.

    Each goes into a copy of the package and is checked in a process of its own. Exit status 1: one is not detected.
    """
    given = locals()
    from dataclasses import replace

    from specsim.core.files import check_writable
    from specsim.correctness.faults import exhibit

    check_writable(json_file)
    line = options.command(faults, given)
    catalogue = replace(exhibit(name, device=device, jobs=jobs, progress=True), command=line)
    options.report(catalogue.show, catalogue.to_json(), json_file, not catalogue.escaped)
