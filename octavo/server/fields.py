"""The table of request fields: what each one takes, means and goes with, declared once beside its
type.

`field` makes a row in the class of a body. pydantic checks its type and range and
`check_interactions` what goes with what; the reference and GET /v1/capabilities are written from
the same rows. Ranges of sampling fields are those that SamplingParams checks.
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
"""A whole number of at most 64 bits."""

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
    """Returns a row of the table; `bounds` are pydantic's (ge, le, max_length ...).

    `takes` says what is allowed, and is what a refusal says; with `by_path` a refusal names the
    faulty part of the value instead. `rules` may hold `needs` ({field: values of which it must have
    one, [] for any}), `excludes` ({field: reason}), `same_as` (a field of the same meaning),
    `inert` (true if a value that is not allowed is ignored, since the answer is the same), `blanks`
    (true if empty texts are ignored), `idle` (true if the field is ignored without what it needs),
    `neutral` (a value that needs nothing),
    `types` (the known types of an object; one of another type is ignored) and words of JSON schema.
    """
    return Field(
        default,
        description=None if by_path else takes,
        json_schema_extra={"takes": takes, "meaning": meaning, **(rules or {})},
        **bounds,
    )


def needed(takes: str, meaning: str = "", *, by_path: bool = False) -> Any:
    """Returns the row of a field that a body cannot do without."""
    return field(takes, meaning, default=..., by_path=by_path)


def sampling(name: str, **rules: Any) -> Any:
    """Returns the row of a field of SamplingParams, as it is declared there."""
    option = OPTIONS[name]
    if isinstance(option, Number):
        low = "exclusiveMinimum" if option.above_low else "minimum"
        rules |= {low: option.span[0], "maximum": option.span[1]}
    if str in get_args(option.type):
        rules["blanks"] = True
    return field(_in_json(option.takes), option.help, rules=rules)


def add_sampling_fields(kind: type[BodyT]) -> type[BodyT]:
    """Decorates a body with the extensions of SamplingParams, which every dialect accepts."""
    rows: dict[str, Any] = {
        name: (_body_type(option), sampling(name))
        for name, option in OPTIONS.items()
        if option.is_extension
    }
    doc, module = kind.__doc__, kind.__module__
    return create_model(kind.__name__, __base__=kind, __doc__=doc, __module__=module, **rows)


def _body_type(option: Option) -> Any:
    """Returns the type of a body's field: None stands for a field that is not given."""
    return (Whole if option.type is int else option.type) | None


def _in_json(takes: str) -> str:
    """Returns words for allowed values as a client of JSON writes these."""
    return takes.replace("None", "null").replace("True or False", "true or false")


def taken(takes: str, **bounds: Any) -> Any:
    """Returns the row of a field that clients send and that changes nothing here."""
    return field(takes, "taken; changes nothing here", rules={"inert": True}, **bounds)


def stop_texts(takes: str, **bounds: Any) -> Any:
    """Returns the row of `stop` in a dialect with other limits."""
    return field(takes, OPTIONS["stop"].help, rules={"blanks": True}, **bounds)


def user_name() -> Any:
    """Returns the row of the user that asks."""
    return field(
        "a text of at most 200 characters; a fair policy shares among them",
        "user that asks",
        rules={"inert": True},
        max_length=200,
    )


def is_set(value: Any) -> bool:
    """Returns whether a field has a value; many clients send false, "" and [] for none."""
    return not (value is None or value is False or value in ("", []))


def check_interactions(body: BaseModel, ignored: IgnoredFields) -> None:
    """Raises InvalidRequest where a body's fields do not go together; those that change nothing
    without another one are ignored.
    """
    for name, rules in _interactions(type(body)):
        value = getattr(body, name)
        if not is_set(value) or value == rules.get("neutral"):
            continue
        for other, values in rules.get("needs", {}).items():
            got = getattr(body, other)
            if got is None or (values and got not in values):
                when = f"where {other} is {_spelled(values)}" if values else f"with {other}"
                if not rules.get("idle"):
                    raise InvalidRequest(f"{name}: allowed only {when}", param=name)
                ignored.add(name, f"allowed only {when}")
                setattr(body, name, None)
                break
        for other, reason in rules.get("excludes", {}).items():
            if is_set(getattr(body, other)):
                raise InvalidRequest(
                    f"{name}: got {_spelled([value])} with {other}, allowed is one of them:"
                    f" {reason}",
                    param=name,
                )
        twin = rules.get("same_as")
        if twin is not None and getattr(body, twin) not in (None, value):
            raise InvalidRequest(f"{name}: differs from {twin}, which means the same", param=name)


def described(kind: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Returns the rows of a body in plain data, by field; words are those of JSON schema.

    `type` is one of JSON's types or a list of them; `help` says what the field is for.
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
    found: dict[str, Any] = {
        "name": name,
        "type": types[0] if len(types) == 1 else types,
        "takes": entry.get("takes") or entry.get("description") or "",
        "help": entry.get("meaning", ""),
        "default": entry.get("default"),
    }
    if choices:
        found["choices"] = choices
    words = {"min": "minimum", "max": "maximum", "above": "exclusiveMinimum"}
    bounds = entry if len(kinds) != 1 else {**kinds[0], **entry}
    found |= {ours: bounds[theirs] for ours, theirs in words.items() if theirs in bounds}
    kept = (*INTERACTIONS, "inert")
    return found | {word: entry[word] for word in kept if word in entry}


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


def _spelled(values: Sequence[Any]) -> str:
    """Returns values as JSON spells them."""

    def plain(part: Any) -> Any:
        return part.model_dump(exclude_unset=True)

    return " or ".join(json.dumps(one, ensure_ascii=False, default=plain)[:80] for one in values)
