"""Objects inside request bodies: strict types, and tolerance of what this server does not know.

Unknown fields, list entries of unknown types, unusable values of inert fields and blank texts are
kept aside while pydantic validates; `note_ignored` then reports and removes them. A whole number
may be written as 4.0. Knows no dialect.
"""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, core_schema

from octavo.api.errors import InvalidRequest, shown
from octavo.server.ignored import UNSUPPORTED, IgnoredFields, join_path, label_of

BLANK = "got an empty text, which stops nothing"


class Dropped:
    """Stands for a value that is ignored until `note_ignored` has removed it."""

    def __init__(self, reason: str, kind: str = "", stand_in: Any = None) -> None:
        self.reason = reason
        self.kind = kind
        """The `type` of an object whose type is not known, as a path shows it."""
        self.stand_in = stand_in
        """Part that takes its place in a list; None for none."""


def _end_at_first_fault(schema: Any) -> None:
    """Makes all lists of a pydantic schema stop at their first fault."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _end_at_first_fault(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _end_at_first_fault(part)


def _take_whole_floats(schema: Any) -> None:
    """Makes the whole numbers of a field's schema take 4.0 for 4; those in lists stay strict, which
    may be a million token ids.
    """
    if schema["type"] == "int":
        inner = schema.copy()
        schema.clear()
        schema.update(core_schema.no_info_before_validator_function(_whole_number, inner))
    elif schema["type"] in ("default", "nullable"):
        _take_whole_floats(schema["schema"])
    elif schema["type"] == "union":
        for choice in schema["choices"]:
            _take_whole_floats(choice[0] if isinstance(choice, tuple) else choice)


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class BodyPart(BaseModel):
    """Base of all request bodies and of the objects in them: strict types, finite numbers, unknown
    fields kept aside. A list is refused at its first fault: a body may hold a million of them.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Fields that other servers know, and that are ignored here."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Fields that other servers know, and without which the answer would be a wrong one."""
    types: ClassVar[tuple[str, ...]] = ()
    """Values of `type` that this server knows; lists drop entries of other types. () for any."""
    noted: ClassVar[frozenset[str]] = frozenset()
    """Values of `type` of entries for which a part with a note stands (`note_of`)."""

    @classmethod
    def note_of(cls, value: dict[str, Any]) -> BodyPart | None:
        """Returns the part that stands for an entry whose type is in `noted`; None for none."""
        return None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        whole = handler.resolve_ref_schema(schema)
        _end_at_first_fault(whole)
        for name, member in whole["schema"].get("fields", {}).items():  # type: ignore[typeddict-item]
            if get_rule(cls, name, "inert"):
                takes = get_rule(cls, name, "takes")
                _wrap(member["schema"], functools.partial(_drop_unusable, takes))
            if get_rule(cls, name, "blanks"):
                _wrap(member["schema"], _drop_blanks)
            _take_whole_floats(member["schema"])
            if types := get_rule(cls, name, "types"):
                _wrap(member["schema"], functools.partial(_drop_other_types, types))
        if cls.types:
            check = functools.partial(_drop_other_types, cls.types, kind=cls)
            return core_schema.no_info_wrap_validator_function(check, schema)
        return schema


def get_rule(kind: type[BaseModel], name: str, rule: str) -> Any:
    """Returns a rule of a field's row in the table (`fields.py`); None where it has none."""
    info = kind.model_fields.get(name)
    extra = None if info is None else info.json_schema_extra
    return extra.get(rule) if isinstance(extra, dict) else None


def note_ignored(part: BodyPart, ignored: IgnoredFields, path: str = "") -> None:
    """Reports what a part holds that this server does not know, and removes dropped values."""
    for name, value in (part.model_extra or {}).items():
        if value is not None:
            _note_unknown(part, name, join_path(path, name), ignored)
    for name, alias in _nested_fields(type(part)):
        value, where = getattr(part, name), join_path(path, alias)
        if isinstance(value, BodyPart):
            note_ignored(value, ignored, where)
        elif isinstance(value, Dropped):
            ignored.add(where, value.reason)
            setattr(part, name, None)
        elif isinstance(value, list) and _note_entries(value, ignored, where):
            setattr(part, name, _without_dropped(value))


def _note_entries(entries: Sequence[Any], ignored: IgnoredFields, path: str) -> bool:
    """Reports the entries of a list; returns whether any of them is dropped."""
    is_any_dropped = False
    where = f"{path}[]"
    for index, entry in enumerate(entries):
        if ignored.is_strict:
            where = f"{path}[{index}]"
        if isinstance(entry, BodyPart):
            note_ignored(entry, ignored, where)
        elif isinstance(entry, Dropped):
            is_any_dropped = True
            if entry.kind:
                ignored.add(f"{where}.type", entry.reason, shown_as=f"{path}[type={entry.kind}]")
            else:
                ignored.add(where, entry.reason)
    return is_any_dropped


def _without_dropped(entries: Sequence[Any]) -> list[Any]:
    """Returns the entries of a list, with what stands for those that are dropped."""
    found = (entry.stand_in if isinstance(entry, Dropped) else entry for entry in entries)
    return [entry for entry in found if entry is not None]


def _note_unknown(part: BodyPart, name: str, path: str, ignored: IgnoredFields) -> None:
    if name in part.refused:
        raise InvalidRequest(f"{path}: {UNSUPPORTED}", param=path)
    if not ignored.is_strict:
        ignored.add(path)
        return
    close = difflib.get_close_matches(name, type(part).model_fields, 1)
    is_known = name in part.unsupported
    ignored.add(
        path,
        UNSUPPORTED if is_known else "no such field",
        hint=f"did you mean {close[0]}?" if close and not is_known else None,
    )


@functools.cache
def _nested_fields(kind: type[BodyPart]) -> list[tuple[str, str]]:
    """Returns (name, name in JSON) of the fields that may hold parts or dropped values."""
    return [
        (name, info.alias or name)
        for name, info in kind.model_fields.items()
        if _holds_part(info.annotation)
        or any(get_rule(kind, name, rule) for rule in ("inert", "types", "blanks"))
    ]


def _holds_part(annotation: Any) -> bool:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return issubclass(annotation, BodyPart)
    return any(_holds_part(argument) for argument in typing.get_args(annotation))


def _wrap(schema: Any, check: Callable[[Any, ValidatorFunctionWrapHandler], Any]) -> None:
    """Puts a check around the schema of a field's value, inside that of its default."""
    assert schema["type"] == "default", "a field that may be ignored has a default"
    schema["schema"] = core_schema.no_info_wrap_validator_function(check, schema["schema"])


def _drop_unusable(takes: str, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Drops a value that is not one of those that are allowed."""
    try:
        return validate(value)
    except ValidationError:
        return Dropped(f"got {shown(value)}, allowed is {takes}")


def _drop_blanks(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Drops an empty text, and the empty and null entries of a list."""
    if value == "":
        return Dropped(BLANK)
    if not isinstance(value, list) or all(value):
        return validate(value)
    texts = iter(validate([entry for entry in value if entry not in ("", None)]))
    return [Dropped(BLANK) if entry in ("", None) else next(texts) for entry in value]


def _drop_other_types(
    types: Sequence[str],
    value: Any,
    validate: ValidatorFunctionWrapHandler,
    *,
    kind: type[BodyPart] = BodyPart,
) -> Any:
    """Drops an object of a type that is not known to `kind`, the class of a list's entries."""
    given = value.get("type") if isinstance(value, dict) else None
    if not isinstance(given, str) or given in types:
        return validate(value)
    reason = f"got {shown(given)}, allowed are {', '.join(types)}"
    stand_in = kind.note_of(value) if given in kind.noted else None
    return Dropped(reason, label_of(given), stand_in)
