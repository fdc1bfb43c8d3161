"""The one place where a command's error becomes a message on stderr and an exit code.

2: the caller's fault (an option, a file, a request). 1: the engine's, or nobody reads the output
any more. 130: Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from octavo.errors import ClientError, OctavoError, SetupError

CALLERS_FAULT, ENGINES_FAULT, INTERRUPTED = 2, 1, 130


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Runs it. Anything that is no known kind of error is a bug and keeps its traceback."""
    try:
        return command() or 0
    except typer.TyperException as error:
        _say(*_describe(error))
        return CALLERS_FAULT
    except OctavoError as error:
        _say(error.message, error.hint)
        return CALLERS_FAULT if isinstance(error, ClientError | SetupError) else ENGINES_FAULT
    except MemoryError:
        _say(
            "not enough memory",
            "free memory, or take a smaller model, --max-model-len or --max-num-seqs",
        )
        return CALLERS_FAULT
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def _describe(error: typer.TyperException) -> tuple[str, str | None]:
    """What the flag parser found wrong: message and hint."""
    possible = getattr(error, "possibilities", None)
    if possible:
        return error.message, f"did you mean {' or '.join(possible)}?"
    context = getattr(error, "ctx", None)
    given = _given(getattr(error, "param", None))
    message = error.format_message() + (f", got {given!r}" if given is not None else "")
    return (
        message,
        f"{context.command_path} --help says what there is" if context is not None else None,
    )


def _given(param: Any) -> str | None:
    """What the command line has as a parameter's value, for parsers that do not say it."""
    names = tuple(getattr(param, "opts", ()))
    for at, argument in enumerate(sys.argv):
        name, equals, value = argument.partition("=")
        if name in names:
            return value if equals else next(iter(sys.argv[at + 1 :]), None)
    return None


def _say(message: str, hint: str | None) -> None:
    print(f"octavo: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
