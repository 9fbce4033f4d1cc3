"""specsim faults: run the fault catalogue."""

from typing import Annotated

from specsim.cli import options
from specsim.cli.options import option


def faults(
    name: Annotated[
        list[str] | None,
        option(
            "Fault catalogue", "Inject only this fault; may be repeated.", metavar="NAME", show_default="all faults"
        ),
    ] = None,
    jobs: Annotated[int, option("Execution", "Processes that share the faults. [at least 1]")] = 2,
    device: options.Device = None,
    json_file: options.JsonFile = None,
) -> None:
    """Inject known faults and check that each is detected.

    Each fault goes into a copy of the package, which is checked in a process of its own.

    Exit status: 0 if every fault is detected, 1 if one is not, 2 for bad input.

    Example:
      specsim faults --jobs 4 --json faults.json
    """
    arguments = locals()
    from dataclasses import replace

    from specsim.correctness.faults import run_catalogue

    line = options.command(faults, arguments)
    catalogue = replace(run_catalogue(name, device=device, jobs=jobs, progress=True), command=line)
    options.report("faults", catalogue.show, catalogue.to_json(), json_file, not catalogue.missed)
