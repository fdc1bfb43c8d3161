"""Sends hidden states from one pipeline stage's process to the next, over a pipe.

A message contains one step's rows with their request ids. When a stage ends, its pipe closes, which
raises EngineDead in the next stage.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import EngineDead
from octavo.engine.protocol.step import ScheduledRequest

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

DTYPES = ("float32", "float64")
"""Data types of hidden states."""


class HiddenHeader(msgspec.Struct):
    """First part of a message: describes the bytes of the second part."""

    request_ids: list[str]
    counts: list[int]
    """Number of rows of each request."""
    width: int
    dtype: str


class HiddenSender:
    """The sending end. A thread writes to the pipe, so the stage can continue with the next
    step.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: queue.SimpleQueue[tuple[HiddenHeader, NDArray] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="octavo-hidden", daemon=True)
        self._thread.start()

    def send(self, rows: Sequence[ScheduledRequest], hidden: NDArray) -> None:
        """Queues the hidden states `[T, W]` of a step's rows; the array must not change later."""
        header = HiddenHeader(
            [row.request_id for row in rows],
            [row.num_tokens for row in rows],
            hidden.shape[1],
            hidden.dtype.name,
        )
        self._waiting.put((header, hidden))

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()
        self._connection.close()

    def _write(self) -> None:
        while (message := self._waiting.get()) is not None:
            header, hidden = message
            try:
                self._connection.send_bytes(self._encoder.encode(header))
                self._connection.send_bytes(hidden.tobytes())
            except OSError:
                return  # the next stage is gone, which the first rank detects


class HiddenReceiver:
    """The receiving end, which holds the hidden states of the current step."""

    def __init__(self, connection: Connection, source: str) -> None:
        """`source`: name of the previous stage in error messages."""
        self._connection = connection
        self._source = source
        self._decoder = msgspec.msgpack.Decoder(HiddenHeader)
        self._held: dict[str, NDArray] = {}

    def receive(self) -> None:
        """Waits for the next step's rows, which replace the current ones; raises EngineDead if the
        previous stage has ended.
        """
        try:
            header = self._decoder.decode(self._connection.recv_bytes())
            data = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise EngineDead(f"{self._source} has ended") from None
        num_rows = sum(header.counts)
        expected = num_rows * header.width * (8 if header.dtype == "float64" else 4)
        if header.dtype not in DTYPES or len(data) != expected:
            raise EngineDead(
                f"{self._source} sent {len(data)} bytes of {header.dtype}, expected {expected} for"
                f" {num_rows} rows of {header.width}"
            )
        rows = np.frombuffer(data, header.dtype).reshape(num_rows, header.width)
        ends = np.cumsum(header.counts).tolist()
        self._held = {
            request_id: rows[end - count : end]
            for request_id, count, end in zip(header.request_ids, header.counts, ends, strict=True)
        }

    def get(self, rows: Sequence[ScheduledRequest]) -> NDArray:
        """Returns the hidden states `[T, W]` of some requests of the step, in the order of
        `rows`.
        """
        if len(rows) == 1:
            return self._held[rows[0].request_id]
        return np.concatenate([self._held[row.request_id] for row in rows])

    def close(self) -> None:
        """Closes the pipe, which also ends a wait for the previous stage."""
        self._connection.close()
