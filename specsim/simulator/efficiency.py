"""The physical parameters that a cost is fitted by: few, named, with units.

Defaults are what fits to published tables found (`specsim simulate --table NAME`, kept in fitted.json): the mean on a
logarithmic scale over the tables that a field's comment names, in two digits. They are no calibration of any server.
"""

from dataclasses import dataclass, fields

from specsim.simulator.bounds import number, share

SHARES = ("bandwidth", "compute", "experts", "mxfp4_experts")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the hardware's peak that a server reaches, and the seconds that it adds."""

    # Share of the peak that long reads reach: 0.97 on an H200 (fast_rounds), 0.66 of vLLM in 2025 (vllm_20780).
    bandwidth: float = 0.8
    # Share of the peak that large products reach: fast_rounds, on an H200. The H20 of sglang_6995 needs more than 0.6;
    # vLLM on a B200 reached 0.33 (vllm_41162).
    compute: float = 0.71
    # Share of the shorter of reading and computing hidden behind the longer, in [0, 1]: fast_rounds, spec_bench.
    overlap: float = 0.34
    # Speed of the products of experts, as a share of other products' speed: GLM-4.7-Flash in 16 bits (vllm_41162).
    experts: float = 1.0
    # The same of experts in mxfp4, which kernels widen first: GPT-OSS-20B (vllm_41162).
    mxfp4_experts: float = 0.28
    # Seconds between two kernels of a graph: 3.6 µs of specsim.fast (fast_rounds), 9 to 12 µs of vLLM, where they stand
    # for sampling and metadata too (vllm_41162).
    gap: float = 5.9e-6
    # Seconds in which the host launches a kernel where there is no graph. Taken, not fitted: steps with chunks of
    # prompts in vllm_41162 leave no room for more than 40 µs. Kernels launched from Python take 30 to 80 µs
    # (spec_bench, vllm_20780).
    launch: float = 5e-6
    # Seconds of the host per step: vllm_20780; sglang#11398 saw 1.1 ms.
    host: float = 8.8e-4
    host_request: float = 5e-6  # seconds of the host per request of a step; taken, not fitted
    collective: float = 8e-6  # seconds that an exchange between GPUs waits; taken, not fitted
    # Seconds per step in which the device applies top-k and top-p: none unless asked for; vllm#40376 saw 0.31 ms.
    filters: float = 0.0

    def __post_init__(self) -> None:
        for name in SHARES:
            share(name, getattr(self, name))
        number("overlap", self.overlap)
        if self.overlap:
            share("overlap", self.overlap)
        for name in ("gap", "launch", "host", "host_request", "collective", "filters"):
            number(name, getattr(self, name))

    @property
    def given(self) -> dict[str, float]:
        """The fields that somebody set to other values than the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}
