"""Timings of the fast column on a GPU, each beside its bound and its rivals, none without its equality check."""

from specsim.bench.result import Result
from specsim.bench.session import bench
from specsim.bench.suites import SUITES, Options

__all__ = ["SUITES", "Options", "Result", "bench"]
