"""Law tests of running engines: do the tokens that come out follow the target's law?"""

from specsim.laws.run import Laws, laws

__all__ = ["Laws", "laws"]
