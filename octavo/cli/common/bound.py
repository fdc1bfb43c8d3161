"""Runs the `octavo` command as a child process that ends with its parent."""

from __future__ import annotations

import signal
import sys

from octavo.utils.child_process import bind_to_parent


def main() -> None:
    """Runs the command of the arguments, until it is stopped or its parent ends."""
    bind_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.cli.app import run_command

    sys.exit(run_command(sys.argv[1:]))
