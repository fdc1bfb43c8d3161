"""Child processes that run Octavo's code: start, stop and exit codes.

A bound child ends whenever its parent ends: its standard input is a pipe from the parent, which is
then closed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from octavo.api.errors import EngineDead, OctavoError, make_error

RUN_MAIN = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    " from {module} import {function}; {function}()"
)
"""Python code of a bound child. Ctrl-C reaches the entire process group but is handled by the
parent, so the child first ignores it, before importing anything else.
"""


class ChildFailed(msgspec.Struct, tag=True):
    """A child's last message: the exception that ended it."""

    kind: str
    """Class name of the exception, from octavo.api.errors or elsewhere."""
    message: str
    hint: str | None = None

    @staticmethod
    def of(error: Exception) -> ChildFailed:
        message = getattr(error, "message", str(error))
        return ChildFailed(type(error).__name__, message, getattr(error, "hint", None))

    def error(self, child: str) -> OctavoError:
        """Recreates an OctavoError; other exceptions become EngineDead. `child` is a name for the
        message.
        """
        known = make_error(self.kind, self.message, self.hint)
        return known or EngineDead(f"{child} has failed: {self.kind}: {self.message}")


def start_python(
    arguments: Sequence[str],
    *,
    unset: Collection[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> subprocess.Popen[Any]:
    """Starts this interpreter with the same module search path.

    `unset` names environment variables that the child does not inherit, `environment` adds
    variables, and `options` are Popen's. -P excludes the current directory from the search path.
    """
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        env=kept | {"PYTHONPATH": path, **environment},
        **options,
    )


def start_bound_child(
    main: str,
    arguments: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Starts `main` ("module:function") in a child bound to this process; `main` must call
    `bind_to_parent`.
    """
    module, _, function = main.partition(":")
    code = RUN_MAIN.format(module=module, function=function)
    return start_python(
        ["-c", code, *arguments],
        environment=environment,
        stdin=subprocess.PIPE,
        pass_fds=pass_fds,
    )


def bind_to_parent(clean_up: Callable[[], None] | None = None) -> None:
    """Ends this process, after `clean_up`, when its parent has ended."""
    threading.Thread(target=_end_with_parent, args=(clean_up,), daemon=True).start()


def _end_with_parent(clean_up: Callable[[], None] | None) -> None:
    while os.read(0, 1):
        pass
    if clean_up is not None:
        clean_up()
    os._exit(0)


def end_process(process: subprocess.Popen[Any], patience_s: float) -> None:
    """Waits for a child that is shutting down, and kills it after `patience_s` seconds."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def describe_exit(code: int) -> str:
    """Describes a Popen return code; negative ones are signals."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
