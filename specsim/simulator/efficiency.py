"""Physical parameters of a cost model, which fits determine: few, named, with units.

Defaults were found by fits to published tables (`specsim simulate --table NAME`): the mean on a logarithmic scale over
the tables that a field's comment names, to two digits. They do not calibrate any single server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from specsim.core.arguments import check_arguments
from specsim.core.errors import require_choices
from specsim.core.limits import NonNegativeNumber, Probability, Share

SHARES = ("bandwidth", "compute", "experts", "mxfp4_experts")


@check_arguments
@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the hardware's peak that a server reaches, and seconds that it adds."""

    # Share of the peak that long reads reach: 0.94 on an H200 (fast_rounds), 0.66 of vLLM in 2025 (vllm_20780).
    bandwidth: Share = 0.79
    # Share of the peak that large products reach: fast_rounds, on an H200. The H20 of sglang_6995 needs more than 0.6;
    # vLLM on a B200 reached 0.33 (vllm_41162).
    compute: Share = 0.69
    # Share of the shorter of reading and computing hidden behind the longer, in [0, 1]: fast_rounds, spec_bench.
    overlap: Probability = 0.39
    # Speed of the products of experts, as a share of other products' speed: GLM-4.7-Flash in 16 bits (vllm_41162).
    experts: Share = 1.0
    # The same of experts in mxfp4, which kernels widen first: GPT-OSS-20B (vllm_41162).
    mxfp4_experts: Share = 0.28
    # Seconds between two kernels of a graph: 3.3 µs of specsim.fast (fast_rounds), 9 to 12 µs of vLLM, where they
    # include sampling and metadata (vllm_41162).
    gap: NonNegativeNumber = 5.6e-6
    # Seconds of the host for launching a kernel outside a graph. Assumed, not fitted: steps with chunks of prompts in
    # vllm_41162 leave no room for more than 40 µs. Kernels launched from Python take 30 to 80 µs (spec_bench,
    # vllm_20780).
    launch: NonNegativeNumber = 5e-6
    # Seconds of the host per step: vllm_20780; 1.1 ms in sglang#11398.
    host: NonNegativeNumber = 8.8e-4
    host_request: NonNegativeNumber = 5e-6  # seconds of the host per request of a step; assumed, not fitted
    # Seconds of the host per round with drafts in addition to those of any step: acceptance, KV of rejected drafts. 0
    # by default, as the other parameters of the tables include it.
    host_drafts: NonNegativeNumber = 0.0
    # Seconds per forward of the drafter in addition to its kernels: choice of drafts, metadata. 0 by default: the other
    # parameters of the tables include it.
    draft_step: NonNegativeNumber = 0.0
    collective: NonNegativeNumber = 8e-6  # seconds that an exchange between GPUs waits; assumed, not fitted
    # Seconds per step of the device for top-k and top-p filters: 0 by default; 0.31 ms in vllm#40376.
    filters: NonNegativeNumber = 0.0

    @property
    def overrides(self) -> dict[str, float]:
        """Fields with other values than the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


Graphs = Literal["all", "target", "none"]


@dataclass(frozen=True, slots=True)
class FittedServer:
    """A server as a fit describes it.

    Fields of Efficiency that it does not name have their defaults.
    """

    found: Mapping[str, float]  # fields of Efficiency that were fitted
    taken: Mapping[str, float]  # fields that the fit took from elsewhere
    schedule: Literal["sync", "overlap"] = "overlap"
    graphs: Graphs = "all"  # forwards in graphs, as in Scenario
    skew: float | None = None  # of models with experts; None: the table has none

    def __post_init__(self) -> None:
        require_choices(self)

    @property
    def efficiency(self) -> Efficiency:
        return Efficiency(**self.taken, **self.found)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Seconds that a request spends outside the engine's steps."""

    intake: float = 0.0  # of one request after the other
    latency: float = 0.0  # of all requests side by side
