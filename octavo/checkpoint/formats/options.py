"""Validation of the values in a `quantization_config`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.api.errors import UnsupportedModel, shown

MAX_GROUP = 1 << 20
USUAL_GROUP = 128
"""Default group size of GPTQ and AWQ configs, as in transformers."""


def quantization_error(what: str) -> UnsupportedModel:
    """Returns the error for an unsupported `quantization_config`."""
    return UnsupportedModel(
        f"config.json: quantization_config: {what}",
        hint="use a checkpoint in bf16 with --quantization, or a GGUF file",
    )


def choice(config: Mapping[str, Any], key: str, allowed: Collection[Any], default: Any) -> Any:
    """Returns a value that must be one of `allowed`; `default` if it is missing."""
    value = config.get(key, default)
    if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
        supported = ", ".join(map(str, allowed))
        raise quantization_error(f"{key} is {shown(value)}, supported: {supported}")
    return value


def layout(config: Mapping[str, Any], keys: Collection[str], allowed: Collection[str]) -> str:
    """Returns the layout named by the first key that has a value, case-insensitively; the first
    allowed one if no key has a value.
    """
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        return next(iter(allowed))
    value = config[key]
    lower: str = choice({key: value.lower() if isinstance(value, str) else value}, key, allowed, "")
    return lower


def flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Returns a value that must be true or false."""
    return bool(choice(config, key, (True, False), default))


def group_size(config: Mapping[str, Any], key: str = "group_size") -> int | None:
    """Returns the inputs per group; None (-1 in the config) for whole rows."""
    value = config.get(key)
    if value is None or (type(value) is int and value == -1):
        return None
    if type(value) is not int or not 0 < value <= MAX_GROUP:
        raise quantization_error(
            f"{key} is {shown(value)}, expected -1 or an integer of at least 1"
        )
    return value
