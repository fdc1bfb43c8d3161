"""Extensions: optional subpackages of octavo that register options, commands and hooks.

Each subpackage with a module `extension` is an extension; EXTENSION in this module declares what it
adds. Classes are given as strings and imported on first use, so that no code outside an extension
refers to it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

Hooks = TypeVar("Hooks")
Answer = TypeVar("Answer")

PACKAGE = Path(__file__).parents[1]

Layer = Literal["config", "model", "kv", "block_choice", "remote_prefill", "metrics", "doctor"]
"""Layers with hooks."""

CommandGroup = Literal[
    "Run models", "Serve models", "Manage models", "Measure and debug", "Help and diagnosis"
]
"""Groups of commands in the help of `octavo`."""


@dataclass(frozen=True, slots=True)
class Extension:
    """The options, commands and hooks that a package adds. Classes are given as "module:class"."""

    options: Sequence[str] = ()
    """Option dataclasses."""
    command_line_only: frozenset[str] = frozenset()
    """Options that refer to files or memory of the machine, so that requests may not set them."""
    commands: Mapping[CommandGroup, Mapping[str, str]] = field(default_factory=dict)
    """Modules of commands, by group and command name."""
    hooks: Mapping[Layer, str] = field(default_factory=dict)
    """Hook class of each layer."""


@functools.cache
def get_extensions() -> tuple[Extension, ...]:
    """Returns the installed extensions, sorted by name."""
    names = sorted(file.parent.name for file in PACKAGE.glob("*/extension.py"))
    modules = [importlib.import_module(f"octavo.{name}.extension") for name in names]
    return tuple(module.EXTENSION for module in modules)


@functools.cache
def extension_options() -> tuple[Any, ...]:
    """Returns each option group of the extensions, with its defaults."""
    return tuple(_load(name)() for each in get_extensions() for name in each.options)


@functools.cache
def get_hooks(layer: Layer, kind: type[Hooks]) -> tuple[Hooks, ...]:
    """Returns an instance of each hook class of a layer; `kind` is their base class."""
    return tuple(hooks() for hooks in load_classes(layer))


@functools.cache
def load_classes(layer: Layer) -> tuple[Any, ...]:
    return tuple(_load(each.hooks[layer]) for each in get_extensions() if layer in each.hooks)


def get_first(answers: Iterable[Answer | None]) -> Answer | None:
    """Returns the first answer that is not None; None if all are."""
    return next((answer for answer in answers if answer is not None), None)


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
