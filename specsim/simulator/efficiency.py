"""The physical parameters that a cost is fitted by: few, named, with units."""

from dataclasses import dataclass

from specsim.simulator.bounds import number, share

SHARES = ("bandwidth", "compute", "experts")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the hardware's peak that a server reaches, and the seconds that it adds."""

    bandwidth: float = 0.8  # share of the peak that long reads reach
    compute: float = 0.7  # share of the peak that large products reach
    overlap: float = 1.0  # share of the shorter of reading and computing hidden behind the longer, in [0, 1]
    experts: float = 1.0  # speed of the experts' products, as a share of other products' speed
    gap: float = 1e-6  # seconds between two kernels of a graph
    launch: float = 5e-6  # seconds in which the host launches a kernel where there is no graph
    host: float = 5e-4  # seconds of the host per step
    host_request: float = 5e-6  # seconds of the host per request of a step
    collective: float = 8e-6  # seconds that an exchange between GPUs waits
    filters: float = 0.0  # seconds per step in which the device applies top-k and top-p

    def __post_init__(self) -> None:
        for name in SHARES:
            share(name, getattr(self, name))
        number("overlap", self.overlap)
        if self.overlap:
            share("overlap", self.overlap)
        for name in ("gap", "launch", "host", "host_request", "collective", "filters"):
            number(name, getattr(self, name))
