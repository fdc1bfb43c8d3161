"""A server for as long as a benchmark lasts: `octavo serve` in a process of its own, on a free
port; how a command is started so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from octavo.errors import ConfigError, EngineDead

END_S = 20.0


@contextmanager
def own_server(options: Mapping[str, Any]) -> Iterator[str]:
    """Its URL, once it serves; what it says goes to stderr. EngineDead where it ends by itself.

    `options` are the engine's, by their flat names.
    """
    flags = [
        flag
        for name, value in options.items()
        if name != "model"
        for flag in shell_flags(name, value)
    ]
    model = [options["model"]] if "model" in options else []
    command = octavo_command("serve", "--port=0", *flags, *model)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        yield _url(process)
        if (code := process.poll()) is not None:
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            raise EngineDead(f"the server ended before the benchmark did ({how})")
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[str]) -> str:
    """Waits for it; what the server says later is passed on by a thread."""
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


def octavo_command(*arguments: str) -> list[str]:
    """By the interpreter that runs here."""
    return [sys.executable, "-P", "-m", "octavo.cli.main", *arguments]


def environment() -> dict[str, str]:
    """Modules from where they come here, compiled once and kept, as those of an installation are;
    no API key.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OCTAVO_API_KEY", "PYTHONDONTWRITEBYTECODE")
    }
    return kept | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def shell_flags(name: str, value: Any) -> list[str]:
    """An option as a shell has it."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{flag}={one}" for one in values]
