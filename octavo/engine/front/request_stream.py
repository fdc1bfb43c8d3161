"""The stream that a caller of AsyncLLM reads: one request's outputs as they grow.

Owns what its reader has seen and the future on which it waits. Knows no core; AsyncLLM wakes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from octavo.engine.front.front import Front
from octavo.engine.front.output_processor import LostRequest
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput


class RequestStream:
    """One request's outputs as they grow, read by one task.

    Each output holds all of the request so far, or with `deltas` what the one before did not. A
    slow reader skips outputs and loses nothing.
    """

    def __init__(
        self, front: Front, request_id: str, drop: Callable[[str], None], *, deltas: bool
    ) -> None:
        """`drop` ends the request when the stream is abandoned."""
        self.request_id = request_id
        self.lost: LostRequest | None = None
        """Request that ran when the stream was abandoned; None if it had ended."""
        self._front = front
        self._drop = drop
        self._deltas = deltas
        self._changed = False
        self._reader: asyncio.Future[None] | None = None
        """The future that the reading task waits on; None before its first wait."""
        self._finished = False
        self._error: OctavoError | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        if not self._changed:
            await self._wait()
        self._changed = False
        if self._error is not None:
            self._finished = True
            raise self._error
        output = self._front.output(self.request_id, only_new=self._deltas)
        self._finished = output.finished
        return output

    async def final(self) -> RequestOutput:
        """Waits for the final output; those before it are not even made."""
        while not (self._error or self._front.is_finished(self.request_id)):
            await self._wait()
        self._changed = True
        return await anext(self)

    async def final_or_abandoned(self) -> RequestOutput:
        """Waits for the final output; cancelling it aborts the request."""
        try:
            return await self.final()
        finally:
            self.abandon()

    def abandon(self) -> bool:
        """Aborts the request if it still runs; returns whether it did."""
        if self._finished:
            return False
        self._finished = True
        self.lost = self._front.lost(self.request_id)
        self._drop(self.request_id)
        return True

    async def aclose(self) -> None:
        """Abandons the request, under the name that async generators have for it."""
        self.abandon()

    def wake(self, error: OctavoError | None = None) -> None:
        """Tells the reader that there is something new, or that an error ends the stream."""
        self._error = self._error or error
        self._changed = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait(self) -> None:
        """Waits for the next change; a reader that is cancelled abandons the request."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        except asyncio.CancelledError:
            self.abandon()
            raise
