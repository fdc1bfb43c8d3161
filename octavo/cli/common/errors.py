"""Turns a command's error into a message on stderr and an exit code.

The code is 2 for user errors (an option, a file, a request), 1 for engine errors, and for signals
the shell's convention: 130 for Ctrl-C, 141 for a closed output pipe.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import typer

from octavo.api.errors import ClientError, OctavoError, SetupError
from octavo.cli.common.exit_codes import CALLERS_FAULT, ENGINES_FAULT, INTERRUPTED, OUTPUT_CLOSED

INVALID = re.compile(r"Input should be ([^,]+)")
"""Matches the allowed values in the flag parser's messages."""

LEAST_LIKENESS = 0.75
"""Minimum similarity of a suggested flag, from 0 to 1."""

WORDS = {
    "a valid integer": "an integer",
    "a valid": "a",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "a number above",
    "less than": "a number below",
}
"""The flag parser's wording, and Octavo's wording."""


def run_and_report(command: Callable[[], None]) -> int:
    """Runs a command and prints its error; unexpected exceptions keep their traceback."""
    try:
        command()
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except BrokenPipeError:
        _discard_output()
        return OUTPUT_CLOSED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (typer.TyperException, OctavoError, MemoryError) as error:
        return _report(error)
    return 0


def _report(error: typer.TyperException | OctavoError | MemoryError) -> int:
    """Prints an error; returns the exit code."""
    if isinstance(error, OctavoError):
        _print(error.message, error.hint)
        is_callers = isinstance(error, ClientError | SetupError)
        return CALLERS_FAULT if is_callers else ENGINES_FAULT
    if isinstance(error, MemoryError):
        hint = "free memory, or use a smaller model, --max-model-len or --max-num-seqs"
        _print("not enough memory", hint)
    else:
        _print(*_describe(error))
    return CALLERS_FAULT


def _discard_output() -> None:
    """Redirects stdout to /dev/null, so that the final flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _describe(error: typer.TyperException) -> tuple[str, str | None]:
    """Returns message and hint for an error of the flag parser."""
    possible = getattr(error, "possibilities", None)
    wrong = getattr(error, "option_name", None)
    if possible and wrong is not None:
        possible = get_close_matches(wrong, possible, n=1, cutoff=LEAST_LIKENESS)
    if possible:
        return error.message, f"did you mean {' or '.join(possible)}?"
    context = getattr(error, "ctx", None)
    param = getattr(error, "param", None)
    given_value, allowed = _get_given_value(param), INVALID.search(error.format_message())
    if param is not None and given_value is not None and allowed is not None:
        name = max(param.opts, key=len).lstrip("-").replace("-", "_")
        return f"{name}: got {given_value!r}, expected {_translate_words(allowed[1])}", None
    message = error.format_message() if wrong is None else error.message
    if given_value is not None:
        message = f"{message.removesuffix('.')}, got {given_value!r}"
    return (
        message,
        f"{context.command_path} --help lists the options" if context is not None else None,
    )


def _translate_words(allowed: str) -> str:
    for theirs, ours in WORDS.items():
        allowed = allowed.replace(theirs, ours)
    return allowed


def _get_given_value(param: Any) -> str | None:
    """Returns a parameter's value on the command line, which some parser errors lack."""
    names = tuple(getattr(param, "opts", ()))
    for index, argument in enumerate(sys.argv):
        name, equals, value = argument.partition("=")
        if name in names:
            return value if equals else next(iter(sys.argv[index + 1 :]), None)
    return None


def _print(message: str, hint: str | None) -> None:
    print(f"octavo: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
