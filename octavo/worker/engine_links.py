"""Connections between engines that share experts: track which step each engine has begun, and which
engines have ended.

Every engine computes the same number of steps. The first engine that begins a step notifies the
others; those without work take part with a dummy step. Exchanges only step numbers.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Sequence

from octavo.api.errors import OctavoError, PeerEngineDead

NOTICE_S = 1.0
"""Timeout in seconds for noticing that another engine ended, after an exchange with it failed."""
NUMBER_BYTES = 8
"""Size of a message: the number of a step that has begun."""


class EngineLinks:
    """The connections of engine `index`, with a thread that reads them."""

    def __init__(self, index: int, files: Sequence[int]) -> None:
        """`files`: descriptors of sockets to the other engines, by index."""
        self.begun = 0
        """Number of the last step that any engine has begun."""
        self._taken = 0
        self._index = index
        self._num_engines = len(files) + 1
        self._closing = False
        self._lost: OctavoError | None = None
        self._is_lost = threading.Event()
        self._on_loss: list[Callable[[OctavoError], None]] = []
        self._on_call: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        """Guards the counts and the loss."""
        others = [at for at in range(self._num_engines) if at != index]
        self._sockets = {
            engine: socket.socket(fileno=file) for engine, file in zip(others, files, strict=True)
        }
        self._reader = threading.Thread(target=self._read, name="octavo-engines", daemon=True)
        self._reader.start()

    @property
    def is_behind(self) -> bool:
        """Whether another engine has begun a step that this one has not."""
        return self.begun > self._taken

    def begin(self) -> None:
        """Begins this engine's next step, and notifies the others if it is the first."""
        with self._lock:
            self._taken += 1
            if self._taken <= self.begun:
                return
            self.begun = self._taken
            message = self._taken.to_bytes(NUMBER_BYTES, "little")
        for link in self._sockets.values():
            with contextlib.suppress(OSError):  # the reader thread notices the end
                link.sendall(message)

    def when_called(self, on_call: Callable[[], None]) -> None:
        """Registers a callback, called from another thread whenever this engine is behind."""
        self._on_call = on_call
        if self.is_behind:
            on_call()

    def when_lost(self, on_loss: Callable[[OctavoError], None]) -> None:
        """Registers a callback for the end of another engine; called immediately if one has already
        ended.
        """
        with self._lock:
            if self._lost is None:
                self._on_loss.append(on_loss)
                return
        on_loss(self._lost)

    def await_loss(self, timeout_s: float = NOTICE_S) -> OctavoError | None:
        """Returns the error for another engine's end. Returns None if none ends within the
        timeout.
        """
        self._is_lost.wait(timeout_s)
        return self._lost

    def close(self) -> None:
        """Closes the connections, which also ends the other engines."""
        self._closing = True
        for link in self._sockets.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        for link in self._sockets.values():
            link.close()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            rests = {engine: bytearray() for engine in self._sockets}
            for engine, link in self._sockets.items():
                selector.register(link, selectors.EVENT_READ, engine)
            while not self._closing:
                for key, _ in selector.select():
                    if not self._receive(key.data, rests[key.data]):
                        self._note_loss(key.data)
                        return

    def _receive(self, engine: int, rest: bytearray) -> bool:
        """Reads an engine's messages; returns False once the engine has ended."""
        try:
            data = self._sockets[engine].recv(4096)
        except OSError:
            data = b""
        rest += data
        whole = len(rest) // NUMBER_BYTES * NUMBER_BYTES
        if whole:
            number = int.from_bytes(rest[whole - NUMBER_BYTES : whole], "little")
            del rest[:whole]
            with self._lock:
                self.begun = max(self.begun, number)
                is_behind = self.is_behind
            if is_behind:
                self._on_call()
        return bool(data)

    def _note_loss(self, engine: int) -> None:
        if self._closing:
            return
        with self._lock:
            self._lost = PeerEngineDead(
                f"engine {engine} of {self._num_engines} has ended; its experts are missing"
            )
        self._is_lost.set()
        for on_loss in self._on_loss:
            on_loss(self._lost)
