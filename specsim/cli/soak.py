"""specsim soak: serve random programs of requests, and compare each request with its solo run."""

from typing import Annotated, Any

from specsim.cli import options
from specsim.cli.option_groups import with_groups
from specsim.cli.options import option
from specsim.cli.ranks import RankOptions, in_ranks
from specsim.core.errors import InputError


@in_ranks
@with_groups
def soak(
    *,
    requests: Annotated[
        int | None, option("Requests", "Number of requests. [at least 1]", show_default="10000")
    ] = None,
    seed: Annotated[
        int | None, option("Requests", "Seed of the random workloads. [at least 0]", show_default="0")
    ] = None,
    impl: options.Impl = "reference",
    device: options.Device = None,
    graph: Annotated[
        str | None,
        option(
            "Execution",
            "Part of a round that the fast implementation replays as one CUDA graph; eager: none.",
            metavar="eager|step|phase|round",
            show_default="varies between workloads",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        option(
            "Execution",
            "Processes that share the workloads. [at least 1]",
            show_default="2, and 1 with --tensor-parallel, whose ranks are processes",
        ),
    ] = None,
    program: Annotated[
        str | None,
        option("Requests", "Run only this workload, by the name that a failure shows.", show_default="all workloads"),
    ] = None,
    adaptive: options.Adaptive = None,
    adaptive_per_request: options.AdaptivePerRequest = False,
    ranks: RankOptions,
    json_file: options.JsonFile = None,
) -> None:
    """Compare random batched workloads with solo runs.

    Requests arrive, wait, are preempted and are cancelled; the output of each must equal that of its solo run.

    Exit status: 0 if all outputs are equal, 1 if one is not, 2 for bad input, 3 if
    a rank fails.

    Examples:
      specsim soak --requests 500
      specsim soak --impl fast --program 0-0-1
    """
    from specsim.correctness.differential.implementation import Shares
    from specsim.correctness.soak import soak

    drawn = {"num_requests": requests, "seed": seed}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    if program is not None and drawn:
        raise InputError("program", program, "nothing with --requests or --seed, which are parts of the program's name")
    if jobs is None:
        jobs = 2 if ranks.tensor_parallel == 1 else 1
    arguments = {"impl": impl, "device": device, "graph": graph, "jobs": jobs, "program": program}
    policy = options.policy(adaptive, adaptive_per_request)
    name = f"{adaptive} --adaptive-per-request" if adaptive_per_request else adaptive
    arguments |= {"adaptive": policy, "policy_name": name}
    draft_parallel: Any = ranks.draft_parallel  # which EngineOptions checks
    shares = Shares(ranks.tensor_parallel, draft_parallel)
    result = soak(**drawn, progress=True, shares=shares, **arguments)
    options.report("soak", result.show, result.to_json(), json_file, result.is_ok)
