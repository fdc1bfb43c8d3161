"""The `octavo` command and its subcommands.

The module of a subcommand is imported when it is used, and imports the engine only when it runs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from octavo.cli.common.command import Command, Group
from octavo.cli.common.errors import run_and_report
from octavo.utils.extensions import CommandGroup, get_extensions
from octavo.utils.garbage import RARE_COLLECTION
from octavo.utils.version import __version__

OWN_COMMANDS: dict[CommandGroup, tuple[str, ...]] = {
    "Run models": ("run", "chat"),
    "Serve models": ("serve", "ps", "top", "rank"),
    "Manage models": ("pull", "list", "show", "rm", "models", "quantize"),
    "Measure and debug": ("plan", "bench", "eval", "replay"),
    "Help and diagnosis": ("doctor", "docs"),
}
"""Commands by group, in the order of the help. Each is a module of this package with a function of
the command's name, or a `build_app` that returns a Typer app.
"""


def _get_commands() -> dict[str, tuple[CommandGroup, str]]:
    """Returns the group and module of each command; extensions' commands come last in their
    group.
    """
    commands: dict[str, tuple[CommandGroup, str]] = {}
    for group, names in OWN_COMMANDS.items():
        commands |= {name: (group, f"octavo.cli.{name}") for name in names}
        for extension in get_extensions():
            modules = extension.commands.get(group, {})
            commands |= {name: (group, module) for name, module in modules.items()}
    return commands


COMMANDS = _get_commands()
"""Group and module of each command."""


COMPLETION_VARIABLE = "_OCTAVO_COMPLETE"
"""Environment variable in which a shell's completion script sends its request."""
COMPLETED_LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Environment variables with the command line to complete: for bash, and for other shells."""


def build_app(names: Iterable[str] = COMMANDS, *, add_completion: bool = False) -> typer.Typer:
    """Builds the Typer app from the named subcommands; `add_completion` adds the options that
    install shell completion.
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
        group, path = COMMANDS[name]
        module = importlib.import_module(path)
        if hasattr(module, "build_app"):
            app.add_typer(module.build_app(), name=name, rich_help_panel=group)
        else:
            register = app.command(name, cls=Command, rich_help_panel=group)
            register(getattr(module, name))
    return app


def run_command(arguments: Sequence[str]) -> int:
    """Runs a command line; returns its exit code."""
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    elif list(arguments) == ["version"]:
        arguments = ["--version"]
    RARE_COLLECTION.begin()
    _tolerate_bytes()
    is_completing = COMPLETION_VARIABLE in os.environ
    first = _completed_words()[1:2] if is_completing else arguments[:1]
    matching = [name for name in COMMANDS if name in first]
    add_completion = is_completing or not matching
    command = typer.main.get_command(build_app(matching or COMMANDS, add_completion=add_completion))

    def run() -> None:
        if is_completing:
            command.main([], "octavo", COMPLETION_VARIABLE)
        with command.make_context("octavo", list(arguments) or ["--help"]) as context:
            command.invoke(context)

    return run_and_report(run)


def _completed_words() -> list[str]:
    """Returns the words of the command line to complete."""
    return next((os.environ[name].split() for name in COMPLETED_LINES if name in os.environ), [])


def _tolerate_bytes() -> None:
    """Prevents errors from bytes that cannot be decoded or printed.

    In the input they become lone surrogates, which the text checks reject; in the output,
    characters that the terminal cannot show become question marks.
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
