"""specsim faults: run the fault catalogue."""

from dataclasses import dataclass, replace
from typing import Annotated

from specsim.cli.option_fields import command_line, common
from specsim.cli.options import DeviceOptions, JsonOptions, report
from specsim.core.limits import JobCount


@dataclass(frozen=True, kw_only=True)
class FaultsOptions(DeviceOptions, JsonOptions):
    """Options of specsim faults."""

    # Inject only this fault; may be repeated.
    name: Annotated[list[str] | None, common("Fault catalogue", values="NAME", default="all faults")] = None
    # Processes that share the faults.
    jobs: Annotated[JobCount, common("Execution")] = 2


def faults(options: FaultsOptions) -> None:
    """Inject known faults and check that each is detected.

    Each fault goes into a copy of the package, which is checked in a process of its own.

    Exit status: 0 if every fault is detected, 1 if one is not, 2 for bad input, 3
    if a process is lost.

    Example:
      specsim faults --jobs 4 --json faults.json
    """
    from specsim.correctness.faults import run_catalogue

    catalogue = run_catalogue(options.name or None, device=options.device, jobs=options.jobs, progress=True)
    catalogue = replace(catalogue, command=command_line("faults", options))
    report("faults", catalogue.show, catalogue.to_json(), options.json, not catalogue.missed)
