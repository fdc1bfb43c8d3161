"""Declarations of request fields: type, allowed values, meaning and interactions, in one place.

`field` declares a field of a body. pydantic checks types and ranges, `check_interactions` checks
combinations. The reference and GET /v1/capabilities are generated from the same declarations.
Ranges of sampling fields are the defaults of SamplingParams.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, Field, create_model

from octavo.api.errors import InvalidRequest
from octavo.api.sampling_options import Number, Option
from octavo.api.sampling_params import OPTIONS
from octavo.server.ignored import IgnoredFields

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer of at most 64 bits."""

BodyT = TypeVar("BodyT", bound=BaseModel)

INTERACTIONS = ("needs", "excludes", "same_as")


def field(
    takes: str,
    meaning: str = "",
    *,
    default: Any = None,
    by_path: bool = False,
    rules: Mapping[str, Any] | None = None,
    **bounds: Any,
) -> Any:
    """Declares a field; `bounds` are pydantic's (ge, le, max_length ...).

    `takes` describes the allowed values for error messages. With `by_path`, errors name the invalid
    part of the value instead. `rules` may contain:

    - `needs`: {field: allowed values, [] for any}, fields without which this one is rejected
    - `excludes`: {field: reason}
    - `same_as`: a field of the same meaning
    - `inert`: ignore values that are not allowed, since they would have no effect
    - `blanks`: ignore empty texts
    - `idle`: ignore the field without the fields that it needs
    - `neutral`: a value that needs no other field
    - `types`: known types of an object; others are ignored
    - keywords of JSON schema
    """
    return Field(
        default,
        description=None if by_path else takes,
        json_schema_extra={"takes": takes, "meaning": meaning, **(rules or {})},
        **bounds,
    )


def required(takes: str, meaning: str = "", *, by_path: bool = False) -> Any:
    """Declares a required field."""
    return field(takes, meaning, default=..., by_path=by_path)


def sampling(name: str, **rules: Any) -> Any:
    """Declares a field of SamplingParams."""
    option = OPTIONS[name]
    if isinstance(option, Number):
        low = "exclusiveMinimum" if option.above_low else "minimum"
        rules |= {low: option.span[0], "maximum": option.span[1]}
    if str in get_args(option.type):
        rules["blanks"] = True
    return field(
        option.takes.replace("None", "null").replace("True or False", "true or false"),
        option.help,
        rules=rules,
    )


def add_sampling_fields(kind: type[BodyT]) -> type[BodyT]:
    """Adds the extension fields of SamplingParams to a body."""
    rows: dict[str, Any] = {
        name: (_body_type(option), sampling(name))
        for name, option in OPTIONS.items()
        if option.is_extension
    }
    doc, module = kind.__doc__, kind.__module__
    return create_model(kind.__name__, __base__=kind, __doc__=doc, __module__=module, **rows)


def _body_type(option: Option) -> Any:
    """Returns the type of a body's field; None means that it is not given."""
    return (Whole if option.type is int else option.type) | None


def accepted(takes: str, **bounds: Any) -> Any:
    """Declares a field that is accepted without effect."""
    return field(takes, "accepted for compatibility; no effect", rules={"inert": True}, **bounds)


def stop_texts(takes: str, **bounds: Any) -> Any:
    """Declares a field of stop strings whose limits differ from SamplingParams'."""
    return field(takes, OPTIONS["stop"].help, rules={"blanks": True}, **bounds)


def user_name() -> Any:
    """Declares the field that identifies the user."""
    return field(
        "a string of at most 200 characters; tenant of the fair scheduling policy",
        "user id",
        rules={"inert": True},
        max_length=200,
    )


def is_set(value: Any) -> bool:
    """Returns whether a field has a value. Many clients send false, "" or [] instead of omitting a
    field.
    """
    return not (value is None or value is False or value in ("", []))


def check_interactions(body: BaseModel, ignored: IgnoredFields) -> None:
    """Raises InvalidRequest for conflicting fields; fields without effect in this combination are
    reported as ignored.
    """
    for name, rules in _interactions(type(body)):
        value = getattr(body, name)
        if not is_set(value) or value == rules.get("neutral"):
            continue
        for other, values in rules.get("needs", {}).items():
            other_value = getattr(body, other)
            if other_value is None or (values and other_value not in values):
                needed = f"{other} {_format_values(values)}" if values else other
                if not rules.get("idle"):
                    raise InvalidRequest(f"{name}: requires {needed}", param=name)
                ignored.add(name, f"requires {needed}")
                setattr(body, name, None)
                break
        for other, reason in rules.get("excludes", {}).items():
            if is_set(getattr(body, other)):
                raise InvalidRequest(
                    f"{name}: got {_format_values([value])}, not supported with {other}: {reason}",
                    param=name,
                )
        twin = rules.get("same_as")
        if twin is not None and getattr(body, twin) not in (None, value):
            raise InvalidRequest(f"{name}: conflicts with its alias {twin}", param=name)


def describe_fields(kind: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Returns the declarations of a body as plain data, by field, in terms of JSON schema.

    `type` is a JSON type or a list of them; `help` is the field's meaning.
    """
    schema = kind.model_json_schema()
    required = schema.get("required", ())
    return {
        name: _row(name, entry, schema.get("$defs", {})) | {"required": name in required}
        for name, entry in schema.get("properties", {}).items()
    }


def _row(name: str, entry: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in entry.get("anyOf", [entry]) if kind.get("type") != "null"]
    types: list[str] = []
    choices: list[Any] = []
    for kind in kinds:
        kind = parts.get(kind.get("$ref", "").rpartition("/")[2], kind)
        types += [kind["type"]] if "type" in kind else []
        choices += kind.get("enum", [kind["const"]] if "const" in kind else [])
    description: dict[str, Any] = {
        "name": name,
        "type": types[0] if len(types) == 1 else types,
        "takes": entry.get("takes") or entry.get("description") or "",
        "help": entry.get("meaning", ""),
        "default": entry.get("default"),
    }
    if choices:
        description["choices"] = choices
    words = {"min": "minimum", "max": "maximum", "above": "exclusiveMinimum"}
    bounds = entry if len(kinds) != 1 else {**kinds[0], **entry}
    description |= {ours: bounds[theirs] for ours, theirs in words.items() if theirs in bounds}
    copied_rules = (*INTERACTIONS, "inert")
    return description | {word: entry[word] for word in copied_rules if word in entry}


@functools.cache
def _interactions(kind: type[BaseModel]) -> list[tuple[str, dict[str, Any]]]:
    rows = (
        (name, info.json_schema_extra)
        for name, info in kind.model_fields.items()
        if isinstance(info.json_schema_extra, dict)
    )
    return [
        (name, dict(extra)) for name, extra in rows if any(word in extra for word in INTERACTIONS)
    ]


def _format_values(values: Sequence[Any]) -> str:
    """Formats values as JSON."""

    def plain(part: Any) -> Any:
        return part.model_dump(exclude_unset=True)

    return " or ".join(json.dumps(one, ensure_ascii=False, default=plain)[:80] for one in values)
