"""The `octavo` command. Each subcommand has a file; they import the engine only when they run, so that help is quick."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from octavo import __version__
from octavo.cli import bench, chat, doctor, plan, pull, replay, run, serve
from octavo.cli.errors import exit_code_of


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="octavo",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.command("run")(run.run)
    app.command("chat")(chat.chat)
    app.command("serve")(serve.serve)
    app.command("pull")(pull.pull)
    app.command("plan")(plan.plan)
    app.command("replay")(replay.replay)
    app.command("doctor")(doctor.doctor)
    app.add_typer(bench.build_app(), name="bench")
    return app


def main() -> None:
    """The console script. Ends the process with the command's exit code."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show, or what is no text, is no reason to end
    command = typer.main.get_command(build_app())
    sys.exit(exit_code_of(lambda: command(sys.argv[1:] or ["--help"], prog_name="octavo", standalone_mode=False)))


def _print_version(shown: bool) -> None:
    if shown:
        print(f"octavo {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


def _root(version: Version = False) -> None:
    """LLM inference and serving on a plain CPU."""


if __name__ == "__main__":
    main()
