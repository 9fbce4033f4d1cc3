"""Capture of an answer in an emulated graph, for exercises that observe its replays."""

from collections.abc import Callable
from typing import Any

import torch


def replayed(work: Callable[[], Any], buffers: dict[str, torch.Tensor], replays: int) -> dict[str, Any]:
    """Capture work on buffers, and observe them after this number of replays from their present content.

    RuntimeError with the same text for every read on the host.
    """
    from specsim.fast.runtime.graph import HostRead, Tape

    before = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        tape = Tape.of(work)
    except HostRead:
        raise RuntimeError("the capture is refused, as the host would read device data") from None
    for name, buffer in buffers.items():  # the capture has run the work once
        buffer.copy_(before[name])
    for _ in range(replays):
        tape.replay()
    return {name: buffer.tolist() for name, buffer in buffers.items()}
