"""The classes of Octavo's commands: Typer's, with a validator only for options that need one.

Typer has pydantic build a validator for every option of a command, which takes longer than parsing
all of them (`run` has 60). Text, and an option that was not given, needs none; the rest stays
Typer's business. Knows the one attribute in which Typer keeps the validator.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

TEXT = (str, str | None)


class Command(TyperCommand):
    """A command whose options are validated as needed."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _validated_as_needed(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose options are validated as needed."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _validated_as_needed(super().get_params(ctx))


def _validated_as_needed(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "_runtime_param", ...) is None:
            parameter._runtime_param = _AsNeeded()
    return parameters


class _AsNeeded:
    """A stand-in for Typer's `RuntimeParam`, which is built once a value needs it."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None or value == () or param.type_descriptor.annotation in TEXT:
            return value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)
