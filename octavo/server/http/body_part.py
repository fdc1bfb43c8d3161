"""Objects in request bodies: strict types, tolerant of unknown content.

During validation, unknown fields, list entries of unknown types, invalid values of inert fields and
blank texts are set aside; `note_ignored` then reports and removes them. Integers may be written as
4.0.
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
from octavo.server.ignored import UNSUPPORTED, IgnoredFields, join_path, quote_label

BLANK = "got an empty string"


class Dropped:
    """Marks an ignored value until `note_ignored` removes it."""

    def __init__(self, reason: str, kind: str = "", stand_in: Any = None) -> None:
        self.reason = reason
        self.kind = kind
        """The unknown `type` of an object, reported in its path."""
        self.stand_in = stand_in
        """Part that replaces the value in a list; None to remove the value."""


def _end_at_first_fault(schema: Any) -> None:
    """Makes all lists of a pydantic schema fail at the first error."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _end_at_first_fault(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _end_at_first_fault(part)


def _accept_whole_floats(schema: Any) -> None:
    """Makes a field's integers accept 4.0 for 4. Integers in lists stay strict: there may be a
    million token ids.
    """
    if schema["type"] == "int":
        inner = schema.copy()
        schema.clear()
        schema.update(core_schema.no_info_before_validator_function(_whole_number, inner))
    elif schema["type"] in ("default", "nullable"):
        _accept_whole_floats(schema["schema"])
    elif schema["type"] == "union":
        for choice in schema["choices"]:
            _accept_whole_floats(choice[0] if isinstance(choice, tuple) else choice)


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class BodyPart(BaseModel):
    """Base class of bodies and the objects in them: strict types, finite numbers, unknown fields
    set aside. Lists fail at the first error, since they may hold a million entries.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Fields of other servers that are ignored here."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Fields of other servers that are rejected, since ignoring them would give wrong results."""
    types: ClassVar[tuple[str, ...]] = ()
    """Known values of `type`; list entries of other types are dropped. (): all types are accepted.
    """
    noted: ClassVar[frozenset[str]] = frozenset()
    """Values of `type` whose entries are replaced by a note (`make_note`)."""

    @classmethod
    def make_note(cls, value: dict[str, Any]) -> BodyPart | None:
        """Returns the part that replaces an entry whose type is in `noted`; None drops it."""
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
            _accept_whole_floats(member["schema"])
            if types := get_rule(cls, name, "types"):
                _wrap(member["schema"], functools.partial(_drop_other_types, types))
        if cls.types:
            check = functools.partial(_drop_other_types, cls.types, kind=cls)
            return core_schema.no_info_wrap_validator_function(check, schema)
        return schema


def get_rule(kind: type[BaseModel], name: str, rule: str) -> Any:
    """Returns a rule of a field's declaration (`fields.py`); None if it is not set."""
    info = kind.model_fields.get(name)
    extra = None if info is None else info.json_schema_extra
    return extra.get(rule) if isinstance(extra, dict) else None


def note_ignored(part: BodyPart, ignored: IgnoredFields, path: str = "") -> None:
    """Reports unknown fields and removes dropped values."""
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
    """Reports ignored entries of a list; returns whether any is dropped."""
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
    """Returns the entries of a list, with dropped ones replaced or removed."""
    remaining = (entry.stand_in if isinstance(entry, Dropped) else entry for entry in entries)
    return [entry for entry in remaining if entry is not None]


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
    """Returns (name, JSON name) of the fields that may contain parts or dropped values."""
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
    """Wraps a check around the schema of a field's value, inside the default's schema."""
    assert schema["type"] == "default", "a field that may be ignored has a default"
    schema["schema"] = core_schema.no_info_wrap_validator_function(check, schema["schema"])


def _drop_unusable(takes: str, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Drops an invalid value."""
    try:
        return validate(value)
    except ValidationError:
        return Dropped(f"got {shown(value)}, expected {takes}")


def _drop_blanks(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Drops an empty text, or the empty and null entries of a list."""
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
    """Drops an object of a type unknown to `kind`, the class of a list's entries."""
    type_name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(type_name, str) or type_name in types:
        return validate(value)
    reason = f"got {shown(type_name)}, expected {', '.join(types)}"
    stand_in = kind.make_note(value) if type_name in kind.noted else None
    return Dropped(reason, quote_label(type_name), stand_in)
