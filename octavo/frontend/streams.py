"""Streams of an engine's requests, read in one event loop.

A thread waits for the core's outputs and passes them to the loop, which does everything else. Owns
the streams, the loop, the thread and the error that ended the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from octavo.api.errors import EngineDead, InvalidRequest, OctavoError
from octavo.api.outputs import RequestOutput
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.frontend.frontend import Frontend
from octavo.frontend.output_processor import AbortedRequest


class RequestStream:
    """Outputs of one request as they grow, read by one task.

    Each output contains the complete request so far, or with `deltas` the part since the previous
    output. A slow reader skips outputs but loses no tokens.
    """

    def __init__(
        self, frontend: Frontend, request_id: str, drop: Callable[[str], None], *, deltas: bool
    ) -> None:
        """`drop` aborts the request when the stream is abandoned."""
        self.request_id = request_id
        self.lost: AbortedRequest | None = None
        """Progress of the request when the stream was abandoned; None if it had ended."""
        self._frontend = frontend
        self._drop = drop
        self._deltas = deltas
        self._changed = False
        self._reader: asyncio.Future[None] | None = None
        """Future that the reading task waits on; None before its first wait."""
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
        output = self._frontend.outputs.output(self.request_id, only_new=self._deltas)
        self._finished = output.finished
        return output

    async def final(self) -> RequestOutput:
        """Waits for the final output without creating earlier ones."""
        while not (self._error or self._frontend.outputs.is_finished(self.request_id)):
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
        """Aborts the request if it is unfinished; returns whether it did."""
        if self._finished:
            return False
        self._finished = True
        self.lost = self._frontend.outputs.lost(self.request_id)
        self._drop(self.request_id)
        return True

    async def aclose(self) -> None:
        """Abandons the request. Async generators have a method with this name."""
        self.abandon()

    def wake(self, error: OctavoError | None = None) -> None:
        """Wakes the reader for new output, or for an error that ends the stream."""
        self._error = self._error or error
        self._changed = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait(self) -> None:
        """Waits for the next change. Cancelling the reader abandons the request."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        except asyncio.CancelledError:
            self.abandon()
            raise


@dataclass(frozen=True, slots=True)
class StreamEvents:
    """Callbacks for events of the streams, called in the event loop's thread."""

    step: Callable[[CoreOutputs], None]
    """Called with a step's outputs before the streams are woken."""
    ended: Callable[[str], None]
    """Called with the id of a request that has finished or was dropped."""
    died: Callable[[EngineDead], None]
    """Called with the error that ended the engine."""


class RequestStreams:
    """Streams of one frontend's requests, woken by the core's outputs."""

    def __init__(self, frontend: Frontend, events: StreamEvents) -> None:
        self._frontend = frontend
        self._events = events
        self._streams: dict[str, RequestStream] = {}
        """Streams whose final output has not arrived, by request id; accessed only in the loop's
        thread.
        """
        self._dead: EngineDead | None = None
        """Error that ended the engine; None while it runs. Set by any thread."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop in which all streams are read; None before the first request."""
        self._reader: threading.Thread | None = None

    def start(self) -> bool:
        """Starts receiving the core's outputs in this event loop; returns False if it already did.
        Raises InvalidRequest if another open loop receives them.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise InvalidRequest(
                    "this AsyncLLM belongs to another event loop",
                    hint="create one AsyncLLM per event loop",
                )
            self._loop = loop
        if self._reader is not None:
            return False
        self._reader = threading.Thread(target=self._read, name="octavo-reader", daemon=True)
        self._reader.start()
        return True

    def open(self, request_id: str, *, deltas: bool) -> RequestStream:
        """Returns the stream of a request that was sent to the core."""
        stream = RequestStream(self._frontend, request_id, self._drop, deltas=deltas)
        self._streams[request_id] = stream
        return stream

    def check_alive(self) -> None:
        """Raises EngineDead once the engine has ended."""
        if self._dead is not None:
            raise EngineDead(self._dead.message, hint=self._dead.hint)

    def end(self, error: EngineDead) -> None:
        """Rejects new requests and ends the streams. Thread-safe."""
        self._dead = self._dead or error
        self._call(self._end_streams)

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function in the event loop's thread, or at once if no loop is open."""
        if self._loop is None or self._loop.is_closed():
            function()
        else:
            self._call(function)

    def join(self) -> None:
        """Waits until the thread has ended, which it does once the frontend is closed."""
        if self._reader is not None:
            self._reader.join()

    # -- from the core -----------------------------------------------------------------------------

    def _read(self) -> None:
        """Passes each step's outputs to the event loop; runs in a thread until the engine ends."""
        while self._dead is None:
            try:
                step = self._frontend.client.receive()
            except EngineDead as error:
                self.end(error)
            except Exception as error:
                self.end(EngineDead(f"the engine has failed: {type(error).__name__}: {error}"))
            else:
                if step is not None:
                    self._call(self._take, step)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the event loop's thread, after earlier calls. Does nothing if the
        loop has ended, since there are no readers then.
        """
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function, *arguments)

    def _take(self, step: CoreOutputs) -> None:
        """Wakes the streams of the requests with outputs in a step."""
        self._events.step(step)
        for request_id, is_finished in self._frontend.process_outputs(step).items():
            # Streams that ended with the engine may still get outputs that were received before.
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.wake()
                if is_finished:
                    del self._streams[request_id]
                    self._events.ended(request_id)

    def _end_streams(self) -> None:
        """Wakes every stream with the error that ended the engine."""
        for stream in self._streams.values():
            stream.wake(self._dead)
        self._streams.clear()
        if self._dead is not None:
            self._events.died(self._dead)

    # -- from the streams --------------------------------------------------------------------------

    def _drop(self, request_id: str) -> None:
        """Aborts and removes a request whose stream was abandoned."""
        self._streams.pop(request_id, None)
        self._events.ended(request_id)
        self._frontend.drop(request_id)
