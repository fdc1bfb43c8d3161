"""Command-line flags generated from config fields.

A command decorated with `with_flags` receives the given flags as a dict of checked values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, get_type_hints

import typer

from octavo.config.engine_config import option_fields
from octavo.config.option import OptionField, convert
from octavo.config.sizes import format_size

Command = Callable[..., None]


def with_engine_flags(*, without: Iterable[str] = ()) -> Callable[[Command], Command]:
    """Adds a flag for every engine option; the parameter `options` receives those that are set."""
    left_out = set(without)
    return with_flags(
        "options", {name: spec for name, spec in option_fields().items() if name not in left_out}
    )


def with_flags(parameter: str, specs: Mapping[str, OptionField]) -> Callable[[Command], Command]:
    """Adds a flag for each of `specs`; the command's parameter `parameter` receives the dict."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            options = {
                name: convert(specs[name], value)
                for name in specs
                if (value := given.pop(name)) not in (None, [])
            }
            command(**given, **{parameter: options})

        own = inspect.signature(command).parameters
        hints = get_type_hints(command, include_extras=True)
        kept = [
            entry.replace(annotation=hints[name], kind=entry.KEYWORD_ONLY)
            for name, entry in own.items()
            if name != parameter
        ]
        flags = [_parameter(name, spec) for name, spec in specs.items()]
        wrapped.__signature__ = inspect.Signature([*kept, *flags])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {entry.name: entry.annotation for entry in [*kept, *flags]}
        del wrapped.__wrapped__  # type: ignore[attr-defined]  # inspection must see the flags
        return wrapped

    return decorate


def _completer(choices: Iterable[str]) -> Callable[[str], list[str]] | None:
    """Returns a shell completion function for the choices; None if any text is allowed."""
    if not choices:
        return None

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def format_flags(options: Mapping[str, Any]) -> list[str]:
    """Formats engine options as flags, such as ["--threads=2", "--enable-lora"]."""
    specs, flags = option_fields(), []
    for name, value in options.items():
        spec, flag = specs[name], name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif spec.entry.metadata["unit"] == "bytes":
            flags.append(f"--{flag}={format_size(value)}")
        else:
            texts = value if isinstance(value, tuple) else (value,)
            flags += [f"--{flag}={text}" for text in texts]
    return flags


def flag_help(spec: OptionField) -> str:
    notes = ["repeatable"] if spec.is_list else []
    if spec.default_text:
        notes.append(f"default: {spec.default_text}")
    return f"{spec.help} [{'; '.join(notes)}]" if notes else spec.help


def _parameter(name: str, spec: OptionField) -> inspect.Parameter:
    """Builds the parameter of an option's flag, as Typer reads it from a signature.

    The config parses the value, not Typer, so that errors have the same message in the shell and in
    Python.
    """
    flag, text = "--" + name.replace("_", "-"), flag_help(spec)
    annotation: Any
    if spec.type is bool:
        is_on = spec.entry.default
        names: tuple[str, ...] = (f"{flag}/--no-{flag[2:]}" if is_on else flag,)
        annotation = Annotated[
            bool | None, typer.Option(*names, help=text, rich_help_panel=spec.panel)
        ]
    else:
        names = (flag, short) if (short := spec.entry.metadata["short"]) else (flag,)
        annotation = Annotated[
            list[str] | None if spec.is_list else str | None,
            typer.Option(
                *names,
                help=text,
                metavar=spec.metavar,
                rich_help_panel=spec.panel,
                autocompletion=_completer(spec.choices),
            ),
        ]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )
