"""Reads messages of `octavo chat` and keeps a history between runs.

Lines are edited with readline, which is fast to import, unlike prompt_toolkit. A message may have
several lines: in triple quotes, or with a backslash at the end of each line but the last.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

MAX_HISTORY_LINES = 2000
QUOTES = '"""'


@dataclass(frozen=True, slots=True)
class Entry:
    """A message or a command."""

    text: str
    is_command: bool = False


class ChatInput:
    """The input prompt and its history."""

    def __init__(self, history: Path) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._path = history
        self._readline = self._load_history() if self.is_terminal else None

    def read(self) -> Entry:
        """Returns the next entry; raises EOFError at the end, KeyboardInterrupt at Ctrl-C."""
        line = self._read_line("> ")
        if line.lstrip().startswith(QUOTES):
            return Entry(self._read_quoted(line.lstrip().removeprefix(QUOTES)))
        if line.lstrip().startswith("/"):
            return Entry(line.strip(), is_command=True)
        lines = [line]
        with contextlib.suppress(EOFError):
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._read_line("... "))
        return Entry("\n".join(lines).strip())

    def _read_quoted(self, line: str) -> str:
        """Returns the text up to the closing quotes, or to the end of the input."""
        lines = [line]
        with contextlib.suppress(EOFError):
            while not lines[-1].rstrip().endswith(QUOTES):
                lines.append(self._read_line("... "))
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")

    def _read_line(self, prompt: str) -> str:
        line = input(prompt if self.is_terminal else "")
        if self._readline is not None and line.strip():
            self._readline.add_history(line)
            with contextlib.suppress(OSError):  # a full disk must not end the conversation
                self._readline.append_history_file(1, self._path)
        return line

    def _load_history(self) -> ModuleType | None:
        """Loads the history of earlier runs, from a file that only its owner can read."""
        try:
            import readline
        except ImportError:  # Python was built without readline
            return None
        readline.set_auto_history(False)
        readline.set_history_length(MAX_HISTORY_LINES)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            self._path.chmod(0o600)
            readline.read_history_file(self._path)
        except OSError as error:
            print(f"the history cannot be saved: {error}", file=sys.stderr)
        return readline
