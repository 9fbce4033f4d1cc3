"""Timings of the fast implementation on a GPU, with roofline bounds and baselines, after equality checks."""

from specsim.bench.session import Result, bench
from specsim.bench.suites import SUITES, Options

__all__ = ["SUITES", "Options", "Result", "bench"]
