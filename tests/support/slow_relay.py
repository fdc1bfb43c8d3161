"""A relay before a TCP port, which delays all that goes through it, and may fall silent: a long way
between two machines, where the system cannot delay packets.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

CHUNK = 1 << 16


class SlowRelay:
    """Passes connections on to a port of this machine, each byte `delay_s` later."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._target = port
        self._delay_s = delay_s
        self._passes = threading.Event()
        self._passes.set()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self) -> None:
        """Passes nothing on any more, and closes nothing."""
        self._passes.clear()

    def close(self) -> None:
        self._passes.set()
        for one in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the relay is closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    self._pass_on(source, target)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        for run in (self._read, self._write):
            end = source if run == self._read else target
            threading.Thread(target=run, args=(end, late), daemon=True).start()

    def _read(self, source: socket.socket, late: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"begin"
        while data:
            try:
                data = source.recv(CHUNK)
            except OSError:
                data = b""
            late.put((time.monotonic() + self._delay_s, data))

    def _write(self, target: socket.socket, late: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = late.get()
                time.sleep(max(0.0, due - time.monotonic()))
                self._passes.wait()
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
