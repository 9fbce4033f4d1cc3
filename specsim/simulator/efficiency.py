"""The physical parameters that a cost is fitted by: few, named, with units."""

from dataclasses import dataclass

from specsim.simulator.bounds import not_negative, share

SHARES = ("bandwidth", "compute", "experts")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What a server makes of its hardware.

    bandwidth, compute: shares of the peak that long reads and large products reach. overlap: share of the shorter of
    reading and computing that hides behind the longer one, in [0, 1]. experts: share of other products' speed that
    those of experts reach. gap: seconds between two kernels of a graph. launch: seconds in which the host launches a
    kernel where there is no graph. host: seconds of the host a step; host_request: and for each request in it.
    collective: seconds that an exchange between GPUs waits. filters: seconds a step in which the device applies top-k
    and top-p.
    """

    bandwidth: float = 0.8
    compute: float = 0.7
    overlap: float = 1.0
    experts: float = 1.0
    gap: float = 1e-6
    launch: float = 5e-6
    host: float = 5e-4
    host_request: float = 5e-6
    collective: float = 8e-6
    filters: float = 0.0

    def __post_init__(self):
        for name in SHARES:
            share(name, getattr(self, name))
        not_negative("overlap", self.overlap)
        if self.overlap:
            share("overlap", self.overlap)
        for name in ("gap", "launch", "host", "host_request", "collective", "filters"):
            not_negative(name, getattr(self, name))
