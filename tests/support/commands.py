"""Every command of `octavo`, with the context in which its help is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from octavo.cli.app import build_app


def every_command() -> list[tuple[Any, Any]]:
    root = typer.main.get_command(build_app(add_completion=True))
    return list(_walk(root, root.make_context("octavo", [], resilient_parsing=True)))


def _walk(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    yield command, context
    for name, inner in getattr(command, "commands", {}).items():
        made = inner.make_context(name, [], parent=context, resilient_parsing=True)
        yield from _walk(inner, made)
