"""The `octavo` command as the child of another process of Octavo's, with which it ends."""

from __future__ import annotations

import signal
import sys

from octavo.utils.child_process import bind_to_parent


def main() -> None:
    """Runs the command that the arguments say, until it is told to stop or its parent ends."""
    bind_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.cli.app import run_command

    sys.exit(run_command(sys.argv[1:]))
