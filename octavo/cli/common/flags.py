"""Command-line flags made of config fields: a field's name with dashes is the flag, its text the
help.

A command decorated with `with_flags` gets the flags that were given, and no others, as a dict of
checked values.
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
    """Adds a flag for every engine option; the command's parameter `options` gets those given."""
    left_out = set(without)
    return with_flags(
        "options", {name: spec for name, spec in option_fields().items() if name not in left_out}
    )


def with_flags(parameter: str, specs: Mapping[str, OptionField]) -> Callable[[Command], Command]:
    """Adds a flag for each of `specs`; `parameter` names the command's parameter for the dict."""

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
    """Returns what a shell asks for the rest of a value; None where any text is allowed."""
    if not choices:
        return None

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def format_flags(options: Mapping[str, Any]) -> list[str]:
    """Returns the flags that give these engine options, e.g. ["--threads=2", "--enable-lora"]."""
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
    """Returns the help text of an option's flag."""
    notes = ["repeatable"] if spec.is_list else []
    if spec.default_text:
        notes.append(f"default: {spec.default_text}")
    return f"{spec.help} [{'; '.join(notes)}]" if notes else spec.help


def _parameter(name: str, spec: OptionField) -> inspect.Parameter:
    """Returns an option's flag as Typer reads it from a signature.

    The parser takes its value as text and the config reads it, so that a bad value gets the same
    message from the shell as from Python.
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
