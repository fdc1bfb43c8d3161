"""Imports functions that options name, such as logits processors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from octavo.api.errors import ConfigError, shown


def import_function(
    option: str, module: str, attribute: str, arguments: Sequence[int] | None = None
) -> Callable[..., Any]:
    """Imports a function; with `arguments`, calls it as a factory and returns its result. Raises
    ConfigError if it does not exist.
    """
    where = f"{module}:{attribute}"
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
        if arguments is not None:
            function = function(*arguments)
    except Exception as error:
        raise ConfigError(
            f"{option}: {where} cannot be imported: {type(error).__name__}: {error}",
            hint="install its module, or add its directory to PYTHONPATH",
        ) from error
    if not callable(function):
        raise ConfigError(f"{option}: {where} is {shown(function)}, expected a function")
    return function  # type: ignore[no-any-return]
