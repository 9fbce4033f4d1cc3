"""Law tests of running engines: do the tokens that come out follow the target's law?"""

from specsim.correctness.statistics.suite import Laws, laws

__all__ = ["Laws", "laws"]
