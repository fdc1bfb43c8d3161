"""Command classes based on Typer's: help by group, and validators built on demand.

Typer builds a pydantic validator for every option, which takes longer than parsing them (`run` has
60). Text options and options that are not set need no validator. Relies on the private attribute in
which Typer keeps the validator.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from octavo.cli.common.help import format_help

TEXT = (str, str | None)
TEXTS = (list[str], list[str] | None)

GROUP_HELP = {
    "install_completion": "Install completion for the current shell",
    "show_completion": "Print completion for the current shell",
    "help": "Show this help",
}
"""Help texts that replace Typer's."""


OTHER_NAMES = {
    "benchmark": "bench",
    "complete": "run --raw",
    "convert": "quantize",
    "delete": "rm",
    "download": "pull",
    "embed": "serve minilm, with POST /v1/embeddings",
    "generate": "run",
    "info": "show",
    "ls": "list",
    "remove": "rm",
    "server": "serve",
    "start": "serve",
    "stop": "serve (Ctrl-C stops it)",
    "transcribe": "serve whisper-tiny.en, with POST /v1/audio/transcriptions",
}
"""Names of commands in other programs, and the corresponding Octavo command."""


class Command(TyperCommand):
    """A command with validators built on demand; `--help-all` shows all options."""

    _help_all: TyperOption | None = None

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        if self._help_all is None:
            self._help_all = _help_all_option(parameters[-1])
        return _validated_as_needed([*parameters, self._help_all])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {word for word in args if word.startswith("-")}
        if not ctx.resilient_parsing and flags - {"-h", "--help", "--help-all"}:
            from octavo.cli.foreign.translate_flags import translate

            args = translate(ctx.command_path, self.get_params(ctx), args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(format_help(self, ctx, shows_all=False))


class Group(TyperGroup):
    """A group of commands with validators built on demand."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)
        for param in parameters:
            param.help = GROUP_HELP.get(param.name, param.help)
        return _validated_as_needed(parameters)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and args[0] in OTHER_NAMES and ctx.parent is None:
            ctx.fail(f"No such command {args[0]!r}. It is octavo {OTHER_NAMES[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(format_help(self, ctx, shows_all=True))


def _help_all_option(help_option: Any) -> TyperOption:
    """Builds the `--help-all` option; Typer adds `--help` last."""
    help_option.help = "Show common options"

    def show(ctx: Any, param: Any, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            typer.echo(format_help(ctx.command, ctx, shows_all=True), nl=False, color=ctx.color)
            ctx.exit()

    return TyperOption(
        param_decls=["--help-all"],
        type_descriptor=help_option.type_descriptor,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show all options, by group",
    )


def _validated_as_needed(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "_runtime_param", ...) is None:
            parameter._runtime_param = _AsNeeded()
    return parameters


class _AsNeeded:
    """Replaces Typer's `RuntimeParam`, which is built when a value needs it."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None or value == () or param.type_descriptor.annotation in TEXT:
            return value
        if param.type_descriptor.annotation in TEXTS:
            return list(value)
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)
