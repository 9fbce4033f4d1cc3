"""Limits of a server, and the error of a server that cannot answer."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Most of what clients may ask of a server."""

    queue: int = 256  # requests that do not run yet; more get status 429
    body: int = 4 * 2**20  # bytes of a request
    choices: int = 128  # outputs of a request
    logprobs: int = 64  # alternatives of a token
    queue_seconds: float = math.inf  # that a request may wait; then it ends with status 503
    request_seconds: float = math.inf  # from a request's arrival to its end


class Unavailable(Exception):
    """A server that cannot take or finish a request now, in one sentence, with the status of the answer."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
