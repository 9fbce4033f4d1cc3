"""Sampling tests of running engines: whether their tokens follow the target's distribution."""

from specsim.correctness.statistics.report import SamplingTests
from specsim.correctness.statistics.suite import run_sampling_tests

__all__ = ["SamplingTests", "run_sampling_tests"]
