"""The soak: random programs of requests, each compared with its solo run, every slot audited."""

from specsim.correctness.soak.session import Soak, soak

__all__ = ["Soak", "soak"]
