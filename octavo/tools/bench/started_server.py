"""Runs Octavo commands in child processes, including a server on a free port."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from octavo.api.errors import ConfigError, EngineDead
from octavo.utils.child_process import describe_exit, end_process, start_python

END_S = 20.0
"""Shutdown timeout in seconds, after which the server is killed."""
NOT_INHERITED = ("OCTAVO_API_KEY", "PYTHONDONTWRITEBYTECODE")
"""Environment variables that child processes do not inherit: they need no API key, and should write
bytecode caches as an installation does.
"""


@contextmanager
def started_server(options: Mapping[str, Any]) -> Iterator[str]:
    """Starts `octavo serve`, yields its URL once it is ready, and stops it; forwards its stderr.

    `options` are engine options by flat name. Raises ConfigError if the server does not start,
    EngineDead if it exits early.
    """
    flags = [
        flag
        for name, value in options.items()
        if name != "model"
        for flag in shell_flags(name, value)
    ]
    model = [options["model"]] if "model" in options else []
    process = start_command("serve", "--port=0", *flags, *model, stderr=subprocess.PIPE, text=True)
    try:
        yield _url(process)
        if (code := process.poll()) is not None:
            raise EngineDead(
                f"the server ended before the benchmark did ({describe_exit(code)})",
                hint="the messages above show why",
            )
    finally:
        process.terminate()
        end_process(process, END_S)


def _url(process: subprocess.Popen[str]) -> str:
    """Waits for the server's URL; a thread forwards the rest of its stderr."""
    assert process.stderr is not None
    for line in process.stderr:
        match = re.match(r"serving .* on (http\S+)$", line)
        if match:
            threading.Thread(target=_forward_lines, args=(process.stderr,), daemon=True).start()
            return match[1]
        sys.stderr.write(line)
    raise ConfigError(
        f"the server did not start (exit code {process.wait()})", hint="the messages above show why"
    )


def _forward_lines(lines: Iterator[str]) -> None:
    for line in lines:
        if not line.startswith("try: "):
            sys.stderr.write(line)


def start_command(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Starts an `octavo` command of this installation; `options` are Popen's."""
    return start_python(["-m", "octavo.cli.main", *arguments], unset=NOT_INHERITED, **options)


def shell_flags(name: str, value: Any) -> list[str]:
    """Returns the command-line flags for an option's value."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{flag}={one}" for one in values]
