"""Entry point of the `octavo` command.

Imports almost nothing before `main` runs, so that Ctrl-C exits quietly even while modules are
imported.
"""

from __future__ import annotations

import sys

from octavo.cli.common.exit_codes import INTERRUPTED


def main() -> None:
    try:
        from octavo.cli.app import run_command

        code = run_command(sys.argv[1:])
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        code = INTERRUPTED
    # If a KeyboardInterrupt passes through exec() of a string, as when a dataclass is created,
    # Python sets a flag that makes `python -m` kill itself at exit; another exec() clears the flag.
    exec("")
    sys.exit(code)


def _is_interrupt(error: BaseException | None) -> bool:
    """Returns whether Ctrl-C caused an error: Python 3.11 wraps exceptions raised in
    `__set_name__`.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


if __name__ == "__main__":
    main()
