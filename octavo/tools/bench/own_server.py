"""Octavo's commands in processes of their own, as benchmarks need them: any command, or a server on
a free port for the time of a measurement.
"""

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
"""Time that a server has to stop before it is killed, in seconds."""
NOT_INHERITED = ("OCTAVO_API_KEY", "PYTHONDONTWRITEBYTECODE")
"""Environment variables that a child does without: it needs no key, and its modules are compiled
once and kept, as those of an installation are.
"""


@contextmanager
def own_server(options: Mapping[str, Any]) -> Iterator[str]:
    """Starts `octavo serve`, yields its URL once it serves, and ends it; passes on its stderr.

    `options` are the engine's, by their flat names. Raises ConfigError if it does not start, and
    EngineDead if it has ended by itself.
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
            raise EngineDead(f"the server ended before the benchmark did ({describe_exit(code)})")
    finally:
        process.terminate()
        end_process(process, END_S)


def _url(process: subprocess.Popen[str]) -> str:
    """Waits for the server's URL; a thread passes on what the server says from then on."""
    assert process.stderr is not None
    for line in process.stderr:
        found = re.match(r"serving .* on (http\S+)$", line)
        if found:
            threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True).start()
            return found[1]
        sys.stderr.write(line)
    raise ConfigError(f"the server did not start (exit code {process.wait()})")


def _pass_on(lines: Iterator[str]) -> None:
    for line in lines:
        if not line.startswith("try: "):
            sys.stderr.write(line)


def start_command(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Starts an `octavo` command of this installation; `options` are Popen's."""
    return start_python(["-m", "octavo.cli.main", *arguments], unset=NOT_INHERITED, **options)


def shell_flags(name: str, value: Any) -> list[str]:
    """Returns the command-line flags that set an option to a value."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{flag}={one}" for one in values]
