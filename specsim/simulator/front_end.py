"""Front end of a server: seconds of a request outside the engine's steps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Seconds that a request spends outside the engine's steps."""

    intake: float = 0.0  # of one request after the other
    latency: float = 0.0  # of all requests side by side
