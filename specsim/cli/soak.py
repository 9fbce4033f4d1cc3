"""specsim soak: serve random programs of requests, and compare each request with its solo run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from specsim.cli.option_fields import common, option
from specsim.cli.options import DeviceOptions, GraphName, JsonOptions, PolicyOptions, report
from specsim.cli.ranks import RankOptions, in_ranks
from specsim.core.errors import InputError
from specsim.core.limits import MOST_JOBS, Seed


@dataclass(frozen=True, kw_only=True)
class SoakOptions(DeviceOptions, PolicyOptions, RankOptions, JsonOptions):
    """Options of specsim soak."""

    # Number of requests.
    requests: Annotated[int | None, common("Requests", at_least=1, default="10000")] = None
    # Seed of the random workloads.
    seed: Annotated[Seed | None, common("Requests", default="0")] = None
    # Run only this workload, by the name that a failure shows.
    program: Annotated[str | None, common("Requests", default="all workloads")] = None
    # Implementation that runs.
    impl: Annotated[Literal["reference", "fast"], common("Execution")] = "reference"
    # Part of a round that the fast implementation replays as one CUDA graph; eager: none.
    graph: Annotated[GraphName | None, option("Execution", default="varies between workloads")] = None
    # Processes that share the workloads.
    jobs: Annotated[
        int | None,
        common(
            "Execution",
            at_least=1,
            at_most=MOST_JOBS,
            default="2, and 1 with --tensor-parallel, whose ranks are processes",
        ),
    ] = None


@in_ranks
def soak(options: SoakOptions) -> None:
    """Compare random batched workloads with solo runs.

    Requests arrive, wait, are preempted and are cancelled; the output of each must equal that of its solo run.

    Exit status: 0 if all outputs are equal, 1 if one is not, 2 for bad input, 3 if
    a process is lost.

    Examples:
      specsim soak --requests 500
      specsim soak --impl fast --program 0-0-1
    """
    from specsim.correctness.differential.implementation import Shares
    from specsim.correctness.soak import soak as serve_programs

    drawn = {"num_requests": options.requests, "seed": options.seed}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    program = options.program
    if program is not None and drawn:
        raise InputError("program", program, "nothing with --requests or --seed, which are parts of the program's name")
    policy = options.policy()
    policy_name = options.adaptive
    if options.adaptive_per_request:
        policy_name = f"{policy_name} --adaptive-per-request"
    result = serve_programs(
        **drawn,
        impl=options.impl,
        device=options.device,
        graph=options.graph,
        jobs=options.jobs or (2 if options.tensor_parallel == 1 else 1),
        program=program,
        adaptive=policy,
        policy_name=policy_name,
        progress=True,
        shares=Shares(options.tensor_parallel, options.draft_parallel),
    )
    report("soak", result.show, result.to_json(), options.json, result.is_ok)
