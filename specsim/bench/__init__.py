"""Timings of the fast implementation on a GPU, with roofline bounds and baselines, after equality checks."""

from specsim.bench.result import Result
from specsim.bench.session import bench
from specsim.bench.suites import SUITES, Options

__all__ = ["SUITES", "Options", "Result", "bench"]
