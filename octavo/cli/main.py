"""The `octavo` command. Each subcommand has a file, imported when it is wanted; they import the
engine only when they run.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from octavo.cli.command import Command, Group
from octavo.cli.errors import exit_code_of
from octavo.version import __version__

COMMANDS = ("run", "chat", "serve", "pull", "plan", "replay", "doctor", "bench")
"""Each in the file of its name, as a function of its name, or in a Typer of its own that the file
builds.
"""

COLLECT_AFTER = 200_000
"""Objects made before Python looks for garbage among them, not 700: hardly any of modules and a
model's parts is any, and looking takes a sixteenth of the time to the first token."""


def build_app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    app = typer.Typer(
        name="octavo",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(cls=Group)(_root)
    for name in names:
        module = importlib.import_module(f"octavo.cli.{name}")
        if hasattr(module, "build_app"):
            app.add_typer(module.build_app(), name=name)
        else:
            app.command(name, cls=Command)(getattr(module, name))
    return app


def main() -> None:
    """The console script. Ends the process with the command's exit code."""
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # what a terminal cannot show, or what is no text, is no reason to end
    wanted = [name for name in COMMANDS if name in sys.argv[1:2]]
    command = typer.main.get_command(build_app(wanted or COMMANDS))
    sys.exit(
        exit_code_of(
            lambda: command(sys.argv[1:] or ["--help"], prog_name="octavo", standalone_mode=False)
        )
    )


def _print_version(shown: bool) -> None:
    if shown:
        print(f"octavo {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
]


def _root(version: Version = False) -> None:
    """LLM inference and serving on a plain CPU."""


if __name__ == "__main__":
    main()
