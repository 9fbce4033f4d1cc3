"""The outputs that a client waits for."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from specsim.core.errors import InputError
from specsim.serving.http.job import Progress


class Ticket:
    """The outputs of one call of a client; leaving `updates` before their ends aborts them."""

    def __init__(
        self, request_ids: Sequence[int], updates: "asyncio.Queue[Any]", abort: Callable[[Sequence[int]], object]
    ) -> None:
        self._request_ids = request_ids
        self._updates = updates
        self._abort = abort

    async def updates(self) -> AsyncIterator[tuple[int, Progress]]:
        """Yield the progress of each output, with its number, until all have ended.

        Raises InputError for a request that the scheduler rejects, and Unavailable.
        """
        num_open = len(self._request_ids)
        try:
            while num_open:
                index, progress = await self._updates.get()
                if isinstance(progress, Exception):
                    raise progress
                request = progress.request
                if request.finish_reason == "rejected":
                    most = f"a request within this server's context length ({request.error})"
                    raise InputError("prompt", f"{len(request.prompt_ids)} tokens", most)
                num_open -= progress.is_final
                yield index, progress
        finally:
            if num_open:
                self._abort(self._request_ids)

    async def results(self) -> list[Progress]:
        """Wait for the ends of all outputs."""
        final = {index: progress async for index, progress in self.updates() if progress.is_final}
        return [final[index] for index in range(len(self._request_ids))]
