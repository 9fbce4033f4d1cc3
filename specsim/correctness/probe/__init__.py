"""Black-box checks of a running server with OpenAI's API: speculation must not change what it answers."""

from specsim.correctness.probe.report import ProbeReport, probe
from specsim.correctness.probe.server import Connection, Server
from specsim.correctness.probe.session import ProbeSettings

__all__ = ["Connection", "ProbeReport", "ProbeSettings", "Server", "probe"]
