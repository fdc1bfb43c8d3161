"""Programs as JSON: ops, Values and weights by class and field name.

Fields with their default value are omitted, and every object is stored once. Reading creates only
instances of this package's classes: a damaged or malicious file yields an error or a Program that
fails its checks, and never executes code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from octavo.api.errors import UnsupportedModel
from octavo.program import expert_ops, family_ops, mixers, ops, program
from octavo.program.program import Program

FORMAT = 1
"""Version of the format; other versions are rejected."""

CLASSES: dict[str, type[Any]] = {
    name: each
    for module in (program, ops, expert_ops, mixers, family_ops)
    for name, each in vars(module).items()
    if isinstance(each, type) and is_dataclass(each) and each.__module__ == module.__name__
}
"""Classes that a file may name."""


def to_json(programs: Mapping[str, Program]) -> dict[str, Any]:
    """Returns a model's Programs as a value for `json.dumps`."""
    pool: list[Any] = []
    indices: dict[Any, int] = {}

    def encode(item: Any) -> Any:
        if isinstance(item, tuple | list):
            return [encode(part) for part in item]
        if isinstance(item, Mapping):
            return {"of": {key: encode(part) for key, part in item.items()}}
        if not is_dataclass(item):
            return item
        key = None if isinstance(item, Program) else (type(item).__name__, item)
        if key is None or key not in indices:
            encoded_fields = {
                part.name: encode(getattr(item, part.name))
                for part in fields(item)
                if part.default is MISSING or getattr(item, part.name) != part.default
            }
            pool.append([type(item).__name__, encoded_fields])
            if key is None:
                return {"at": len(pool) - 1}
            indices[key] = len(pool) - 1
        return {"at": indices[key]}

    roots = {name: encode(program) for name, program in programs.items()}
    return {"format": FORMAT, "pool": pool, "programs": roots}


def from_json(data: Any, source: str) -> dict[str, Program]:
    """Returns the Programs of a value from `to_json`.

    Raises UnsupportedModel if `data` is invalid; `source` names its origin in the error.
    """
    try:
        return _decode(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModel(
            f"{source}: not a Program of format {FORMAT} ({error})",
            hint="delete it, and run `octavo derive` again",
        ) from error


def _decode(data: Any) -> dict[str, Program]:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}")
    pool: list[Any] = []

    def decode(item: Any) -> Any:
        if isinstance(item, list):
            return tuple(map(decode, item))
        if isinstance(item, dict) and "at" in item:
            return pool[item["at"]]
        if isinstance(item, dict):
            return {key: decode(part) for key, part in item["of"].items()}
        return item

    for name, encoded_fields in data["pool"]:
        pool.append(CLASSES[name](**{key: decode(value) for key, value in encoded_fields.items()}))
    programs: dict[str, Program] = {}
    for name, root in data["programs"].items():
        programs[name] = decode(root)
        programs[name].check()
    return programs
