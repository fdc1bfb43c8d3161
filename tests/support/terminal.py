"""A command in a terminal of its own: what a person would see, and the keys that they press."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

WAIT_S = 120


class Terminal:
    """A pseudo-terminal in which an `octavo` command runs."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TERM": "xterm", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.cli.main", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  no other way
        )
        os.close(terminal)
        self._unread = ""

    def press(self, keys: str) -> None:
        """Types keys; "\\x03" is Ctrl-C, "\\x04" Ctrl-D, "\\x1b[A" the arrow up."""
        os.write(self._controller, keys.encode())

    def until(self, text: str) -> str:
        """Waits until the terminal has shown a text; returns what it showed up to there."""
        deadline = time.monotonic() + WAIT_S
        while text not in self._unread:
            ready, _, _ = select.select([self._controller], [], [], deadline - time.monotonic())
            assert ready, f"{text!r} was not shown, but {self._unread[-2000:]!r}"
            self._unread += os.read(self._controller, 65536).decode(errors="replace")
        shown, _, self._unread = self._unread.partition(text)
        return shown + text

    def close(self) -> int:
        """Waits for the command's end; returns its exit code."""
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._controller)


def show_on_terminal(*arguments: object, code: int = 0, **variables: str) -> str:
    """Returns what a command prints to standard output on a terminal; checks its exit code."""
    controller, terminal = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.cli.main", *map(str, arguments)],
        stdout=terminal,
        env={**clean, "TERM": "xterm-256color", **variables},
    )
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(controller, 1 << 16):
            shown += part
    except OSError:  # the other end has closed
        pass
    os.close(controller)
    assert process.wait(WAIT_S) == code
    return shown.decode()
