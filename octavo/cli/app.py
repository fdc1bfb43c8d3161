"""The `octavo` command and its subcommands.

Each subcommand has a file, which is imported when it is wanted and imports the engine only when it
runs.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from octavo.cli.common.command import Command, Group
from octavo.cli.common.errors import exit_code_of
from octavo.utils.extensions import get_extensions
from octavo.utils.version import __version__

OWN_COMMANDS = (
    "run",
    "chat",
    "serve",
    "rank",
    "pull",
    "list",
    "show",
    "rm",
    "ps",
    "models",
    "quantize",
    "plan",
    "top",
    "replay",
    "doctor",
    "bench",
)
COMMANDS = {name: f"octavo.cli.{name}" for name in OWN_COMMANDS} | {
    name: module for each in get_extensions() for name, module in each.commands.items()
}
"""Modules of the subcommands, by name, with those of extensions last. Each has a function of that
name, or a `build_app` that makes a Typer app of several.
"""

COLLECT_AFTER = 200_000
"""Number of new objects before Python looks for garbage among them, instead of 700.

Hardly any object made while a model loads is garbage, and looking for it takes a sixteenth of the
time to the first token.
"""


COMPLETION_VARIABLE = "_OCTAVO_COMPLETE"
"""Environment variable in which a shell's completion script says what it asks for."""
COMPLETED_LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Environment variables in which such a script passes the line so far: bash's, and the others'."""


def build_app(names: Iterable[str] = COMMANDS, *, add_completion: bool = False) -> typer.Typer:
    """Imports the named subcommands and puts them together; `add_completion` gives the command the
    options that install shell completion.
    """
    app = typer.Typer(
        name="octavo",
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(cls=Group)(_root)
    for name in names:
        module = importlib.import_module(COMMANDS[name])
        if hasattr(module, "build_app"):
            app.add_typer(module.build_app(), name=name)
        else:
            app.command(name, cls=Command)(getattr(module, name))
    return app


def run_command(arguments: Sequence[str]) -> int:
    """Runs the command that a shell was given; returns its exit code."""
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    elif list(arguments) == ["version"]:
        arguments = ["--version"]
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    _tolerate_bytes()
    is_completing = COMPLETION_VARIABLE in os.environ
    first = _completed_words()[1:2] if is_completing else arguments[:1]
    wanted = [name for name in COMMANDS if name in first]
    add_completion = is_completing or not wanted
    command = typer.main.get_command(build_app(wanted or COMMANDS, add_completion=add_completion))

    def run() -> None:
        if is_completing:
            command.main([], "octavo", COMPLETION_VARIABLE)
        with command.make_context("octavo", list(arguments) or ["--help"]) as context:
            command.invoke(context)

    return exit_code_of(run)


def _completed_words() -> list[str]:
    """Returns the words of the line that a shell wants completed."""
    return next((os.environ[name].split() for name in COMPLETED_LINES if name in os.environ), [])


def _tolerate_bytes() -> None:
    """Keeps bytes that are no text from ending the command where they are read or printed.

    In the input they become lone surrogates, which are refused wherever a text is checked; in the
    output a character that the terminal cannot show becomes a question mark.
    """
    streams = ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace"))
    for stream, errors in streams:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def _print_version(shown: bool) -> None:
    if shown:
        print(f"octavo {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
]


def _root(version: Version = False) -> None:
    """LLM inference and serving, on a plain CPU or on a GPU with PyTorch."""
