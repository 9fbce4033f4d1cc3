"""The soak: random servers, every request compared with itself alone, every slot accounted for."""

from specsim.correctness.soak.session import Soak, soak

__all__ = ["Soak", "soak"]
