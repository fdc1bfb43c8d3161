"""The form of an answer as OpenAI's routes are asked for it: response_format, vLLM's
structured_outputs and the older guided_* fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from octavo.errors import InvalidRequest, shown
from octavo.structured_outputs import StructuredOutputs

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Fields that give one form each, and its name in StructuredOutputs."""

FORMATS = "text, json_object, json_schema, structural_tag"
SCHEMA_KEYS = ("name", "description", "schema", "strict")
MAX_NAME = 64
"""Most characters of a schema's name."""


class FormFields(Protocol):
    """The fields of a body that say which form its answer has."""

    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None
    guided_json: dict[str, Any] | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_whitespace_pattern: str | None


def structured_outputs_of(body: FormFields) -> StructuredOutputs | None:
    """Returns the form that a body asks for; None for any text. More than one are refused."""
    forms = {name: value for name in GUIDED if (value := getattr(body, name)) is not None}
    for name in ("response_format", "structured_outputs"):
        value = getattr(body, name)
        if value is not None and not (name == "response_format" and value.get("type") == "text"):
            forms[name] = value
    if len(forms) > 1:
        first, second, *_ = forms
        raise InvalidRequest(f"{second}: got it with {first}, allowed is one form", param=second)
    name, value = next(iter(forms.items()), ("", None))
    return None if value is None else _form(body, name, value)


def _form(body: FormFields, name: str, value: Any) -> StructuredOutputs:
    if name == "response_format":
        return response_format(value)
    if name == "structured_outputs":
        if "given_as" in value:
            raise InvalidRequest("structured_outputs: unknown field 'given_as'", param=name)
        return StructuredOutputs(**value)
    pattern = body.guided_whitespace_pattern
    return StructuredOutputs(**{GUIDED[name]: value, "whitespace_pattern": pattern}, given_as=name)


def response_format(given: Mapping[str, Any], name: str = "response_format") -> StructuredOutputs:
    """Returns the form of a response_format that is not text; `name` is its field's."""
    kind = given.get("type")
    if kind == "json_object":
        _check_keys(name, given, ("type",))
        return StructuredOutputs(json_object=True, given_as=name)
    if kind == "json_schema":
        _check_keys(name, given, ("type", "json_schema"))
        return StructuredOutputs(json=_schema(given.get("json_schema"), name), given_as=name)
    if kind == "structural_tag":
        _check_keys(name, given, ("type", "structures", "triggers"))
        return StructuredOutputs(structural_tag=dict(given), given_as=name)
    raise InvalidRequest(f"{name}: got the type {shown(kind)}, allowed are {FORMATS}", param=name)


def _schema(given: object, name: str) -> Any:
    """Returns the schema of a json_schema object. It holds whether `strict` is set or not."""
    if not isinstance(given, Mapping) or not isinstance(given.get("schema"), dict | bool):
        raise InvalidRequest(
            f"{name}: got {shown(given)} as json_schema, needed is an object with a name and a"
            " schema",
            param=name,
        )
    _check_keys(f"{name}.json_schema", given, SCHEMA_KEYS)
    label = given.get("name")
    if label is not None and not (isinstance(label, str) and 0 < len(label) <= MAX_NAME):
        raise InvalidRequest(
            f"{name}: got {shown(label)} as the schema's name, allowed is a text of at most"
            f" {MAX_NAME} characters",
            param=name,
        )
    if not isinstance(given.get("strict"), bool | None):
        raise InvalidRequest(
            f"{name}: got {shown(given['strict'])} as strict, allowed is true or false", param=name
        )
    return given["schema"]


def _check_keys(name: str, given: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in given:
        if key not in allowed:
            raise InvalidRequest(
                f"{name}: unknown field {shown(key)}",
                hint=f"allowed are {', '.join(allowed)}",
                param=name.split(".", maxsplit=1)[0],
            )
