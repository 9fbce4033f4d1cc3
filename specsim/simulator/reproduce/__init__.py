"""Published tables beside what the simulator makes of them, with every error."""

from specsim.simulator.reproduce.tables import TABLES, reproduction

__all__ = ["TABLES", "reproduction"]
